package deploy

import (
	"bytes"
	"os"
	"os/exec"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestAPIServer has the API server of a cluster, which the kubeconfig file WEIR_TEST_KUBECONFIG names, check all that a
// user can apply, and the Secrets. Nothing is made there but the namespace weir-test.
func TestAPIServer(t *testing.T) {
	config := os.Getenv("WEIR_TEST_KUBECONFIG")
	if config == "" {
		t.Skip("WEIR_TEST_KUBECONFIG names no cluster; the types of the API have decoded the same objects")
	}
	kubectl := func(input []byte, args ...string) {
		t.Helper()
		cmd := exec.Command("kubectl", append([]string{"--kubeconfig", config}, args...)...)
		cmd.Stdin = bytes.NewReader(input)
		out, err := cmd.CombinedOutput()
		expect(t, err == nil, "kubectl %q: %v\n%s", args, err, out)
	}
	apply := func(name string, m manifests) {
		var all bytes.Buffer
		for _, o := range m.plain {
			text, err := yaml.Marshal(o)
			noError(t, err)
			all.WriteString("---\n" + string(text))
		}
		t.Log(name)
		kubectl(all.Bytes(), "-n", "weir-test", "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f",
			"-")
	}
	kubectl([]byte(`{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "weir-test"}}`), "apply",
		"--server-side", "-f", "-")
	for name, m := range installations(t) {
		apply(name, m)
	}
	apply("helm with everything",
		helm(t, "resp: {enabled: true}\nenvoy: {files: {shop.yaml: \"domain: shop\"}}\nsettings: {audit-log: stderr, trusted-proxies: 10.0.0.0/8}"))
	// a dry run takes none that is not there
	kubectl(nil, "apply", "--server-side", "--dry-run=server", "--validate=strict", "-k",
		madeSecrets(t, "--namespace", "weir-test"))
}
