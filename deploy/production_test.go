package deploy

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

// Pods leave one at a time, each with the time that it has for handing over, and the voters never do.
func TestAutoscaler(t *testing.T) {
	m := kustomize(t, "k8s/overlays/production")
	set, spec := object[appsv1.StatefulSet](t, m, "weir"),
		object[autoscalingv2.HorizontalPodAutoscaler](t, m, "weir").Spec
	r := spec.ScaleTargetRef
	expect(t, r.APIVersion == set.APIVersion && r.Kind == set.Kind && r.Name == set.Name, "it scales %+v", r)
	expect(t, set.Spec.Replicas == nil,
		"the StatefulSet has replicas: each apply would set the autoscaler's number back")
	voters := podSettings(t, m.node(t))["voters"]
	expect(t, spec.MinReplicas != nil && voters == fmt.Sprintf("ordinals:%d", *spec.MinReplicas),
		"there are %v pods at least, and the voters are %s", spec.MinReplicas, voters)
	down := spec.Behavior.ScaleDown
	kill := *set.Spec.Template.Spec.TerminationGracePeriodSeconds
	expect(t, len(down.Policies) == 1 && down.Policies[0].Type == autoscalingv2.PodsScalingPolicy &&
		down.Policies[0].Value == 1 && int64(down.Policies[0].PeriodSeconds) >= kill+60 &&
		*down.StabilizationWindowSeconds >= 300, "pods leave by %+v, and take %d s to end", down, kill)
	up := spec.Behavior.ScaleUp
	expect(t, len(up.Policies) == 1 && up.Policies[0].Type == autoscalingv2.PodsScalingPolicy &&
		up.Policies[0].Value <= 2, "pods come by %+v", up)
	requests := m.node(t).Resources.Requests
	cpu := requests.Cpu()
	expect(t, !cpu.IsZero() && len(spec.Metrics) == 1 && spec.Metrics[0].Resource.Name == corev1.ResourceCPU,
		"it looks at %+v, of requests %v", spec.Metrics, cpu)
}

// Nobody gets to a caller's port but those who say that they call, or scrape, and nodes connect to nodes and name
// servers only.
func TestProductionNetwork(t *testing.T) {
	np := object[networkingv1.NetworkPolicy](t, kustomize(t, "k8s/overlays/production"), "weir").Spec
	for i, rule := range np.Ingress {
		for _, from := range rule.From {
			expect(t, from.PodSelector != nil || from.NamespaceSelector != nil &&
				len(from.NamespaceSelector.MatchLabels) != 0, "ingress[%d] lets all pods in", i)
		}
	}
	expect(t, slices.Contains(np.PolicyTypes, networkingv1.PolicyTypeEgress), "egress is not limited")
	for i, rule := range np.Egress {
		for _, p := range rule.Ports {
			names := p.Port.IntValue() == 53 || p.Port.IntValue() == 5353
			expect(t, len(rule.To) != 0 || names, "egress[%d] opens port %v of everybody", i, p.Port)
		}
	}
}

// podFiles is what pods have in their environment, with files of this machine in the place of their volumes: those of
// Secrets are in a directory for each.
func podFiles(t *testing.T, m manifests, secrets string) settings {
	t.Helper()
	files := make(settings)
	for name, value := range podSettings(t, m.node(t)) {
		if name == "data-dir" {
			continue // each pod has its own
		}
		if !strings.HasPrefix(value, "/") {
			files[name] = value
			continue
		}
		volume, key := mounted(t, m, value)
		if volume.ConfigMap != nil {
			files[name] = filepath.Join(t.TempDir(), key)
			text := object[corev1.ConfigMap](t, m, volume.ConfigMap.Name).Data[key]
			noError(t, os.WriteFile(files[name], []byte(text), 0o600))
			continue
		}
		files[name] = filepath.Join(secrets, volume.Secret.SecretName, key)
	}
	return files
}

// startPods starts three nodes with such settings, on loopback, and waits until they are ready.
func startPods(t *testing.T, files settings) (nodes []*process) {
	t.Helper()
	network := fmt.Sprintf("127.%d.%d.", 100+rand.IntN(100), rand.IntN(256))
	for i := range 3 {
		s := maps.Clone(files)
		s["name"], s["bind"], s["advertise"] = fmt.Sprintf("weir-%d", i), fmt.Sprint(network, i+1),
			fmt.Sprint(network, i+1)
		s["join"] = fmt.Sprintf("%s1:%[2]s,%[1]s2:%[2]s,%[1]s3:%[2]s", network, s["gossip-port"])
		nodes = append(nodes, start(t, s))
	}
	for _, n := range nodes {
		n.waitReady(t)
	}
	return nodes
}

// madeSecrets has the command make Secrets, and returns their directory.
func madeSecrets(t *testing.T, args ...string) string {
	t.Helper()
	secrets := filepath.Join(t.TempDir(), "secrets")
	out, err := runWeir(t, append([]string{"secrets", secrets}, args...)...)
	must(t, err == nil, "weir secrets: %v\n%s", err, out)
	return secrets
}

// What weir secrets makes can be applied, and has all that pods and the scraper take.
func TestMadeSecrets(t *testing.T) {
	dir := madeSecrets(t)
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	noError(t, err)
	made := make(map[string]corev1.Secret)
	namespace := false
	for _, r := range built.Resources() {
		text, err := r.AsYAML()
		noError(t, err)
		if r.GetKind() == "Namespace" {
			namespace = r.GetName() == "weir"
			continue
		}
		var s corev1.Secret
		strictly(t, text, &s)
		expect(t, s.Namespace == "weir", "%s is in namespace %q", s.Name, s.Namespace)
		made[s.Name] = s
	}
	expect(t, namespace, "there is no namespace")
	monitor := object[monitoringv1.ServiceMonitor](t, kustomize(t, "k8s/overlays/monitoring-tls"),
		"weir").Spec.Endpoints[0]
	for _, s := range []*corev1.SecretKeySelector{monitor.Authorization.Credentials, monitor.TLSConfig.CA.Secret} {
		expect(t, made[s.Name].Data[s.Key] != nil, "there is no %s of %s", s.Key, s.Name)
	}
	for _, dir := range []string{"k8s/base", "k8s/overlays/production"} {
		m := kustomize(t, dir)
		for name, value := range podSettings(t, m.node(t)) {
			if !strings.HasPrefix(value, "/") || name == "data-dir" {
				continue
			}
			volume, key := mounted(t, m, value)
			expect(t, volume.Secret == nil || made[volume.Secret.SecretName].Data[key] != nil,
				"%s: --%s takes %s of %+v, which is not made", dir, name, key, volume)
		}
	}
}

// TestChartSecrets starts three nodes with the Secrets that the chart makes.
func TestChartSecrets(t *testing.T) {
	m, dir := helm(t), t.TempDir()
	write := func(secret string) {
		for key, content := range object[corev1.Secret](t, m, secret).Data {
			noError(t, os.MkdirAll(filepath.Join(dir, secret), 0o700))
			noError(t, os.WriteFile(filepath.Join(dir, secret, key), content, 0o600))
		}
	}
	for _, v := range object[appsv1.StatefulSet](t, m, "weir").Spec.Template.Spec.Volumes {
		if v.Secret != nil {
			write(v.Secret.SecretName)
		}
	}
	nodes := startPods(t, podFiles(t, m, dir))
	roots := x509.NewCertPool()
	must(t, roots.AppendCertsFromPEM(readFile(t, filepath.Join(dir, "weir-callers-tls", "ca.crt"))),
		"there is no authority of callers")
	trusting := client(&tls.Config{RootCAs: roots, ServerName: "weir.weir.svc"})
	tokens, scraper := object[corev1.Secret](t, m, "weir-tokens").Data,
		object[corev1.Secret](t, m, "weir-metrics").Data["token"]
	for _, c := range []struct {
		path, token, body string
		want              int
	}{
		{"/v1/check", string(tokens["caller"]), `{"policy":"api","key":"a"}`, http.StatusOK},
		{"/v1/reset", string(tokens["operator"]), `{"policy":"api","key":"a"}`, http.StatusOK},
		{"/v1/charge", string(tokens["operator"]), `{"policy":"api","key":"a","cost":1}`, http.StatusOK},
		{"/metrics", string(scraper), "", http.StatusOK},
		{"/v1/check", "", `{"policy":"api","key":"a"}`, http.StatusUnauthorized},
	} {
		status, text := ask(t, trusting, "https://"+nodes[0].http+c.path, c.token, c.body)
		expect(t, status == c.want, "%s is answered %d, want %d: %s", c.path, status, c.want, text)
	}
	// The access file is that of weir secrets, but for the tokens.
	hashes := regexp.MustCompile(`sha256:[0-9a-f]{64}`)
	access, made := object[corev1.Secret](t, m, "weir-access").Data["access.yaml"],
		readFile(t, filepath.Join(madeSecrets(t), "weir-access", "access.yaml"))
	got, want := hashes.ReplaceAllString(string(access), "HASH"), hashes.ReplaceAllString(string(made), "HASH")
	expect(t, got == want, "the chart's access file is\n%s\nand that of weir secrets\n%s", got, want)
	again := object[corev1.Secret](t, helm(t), "weir-cluster").Data
	expect(t, !bytes.Equal(again["secret"], object[corev1.Secret](t, m, "weir-cluster").Data["secret"]),
		"two installations have the same secret")
}

// TestProduction starts three nodes with the settings of the production overlay's pods and with the Secrets that weir
// secrets makes, on loopback: what the overlay says works, and keeps out whom it should.
func TestProduction(t *testing.T) {
	secrets := madeSecrets(t)
	m := kustomize(t, "k8s/overlays/production")
	monitor := object[monitoringv1.ServiceMonitor](t, kustomize(t, "k8s/overlays/monitoring-tls"),
		"weir").Spec.Endpoints[0]
	secret := func(s corev1.SecretKeySelector) []byte { return readFile(t, filepath.Join(secrets, s.Name, s.Key)) }
	token := func(name string) string { return string(readFile(t, filepath.Join(secrets, "tokens", name))) }

	nodes := startPods(t, podFiles(t, m, secrets))

	roots := x509.NewCertPool()
	must(t, roots.AppendCertsFromPEM(secret(*monitor.TLSConfig.CA.Secret)), "there is no authority of callers")
	trusting := client(&tls.Config{RootCAs: roots, ServerName: *monitor.TLSConfig.ServerName})
	kubelet := client(&tls.Config{InsecureSkipVerify: true}) // as it is
	scraper := string(secret(*monitor.Authorization.Credentials))
	for i, n := range nodes {
		url := "https://" + n.http
		for _, probe := range []*corev1.Probe{m.node(t).StartupProbe, m.node(t).LivenessProbe,
			m.node(t).ReadinessProbe} {
			if status, text := ask(t, kubelet, url+probe.HTTPGet.Path, "", ""); status != http.StatusOK {
				t.Errorf("weir-%d: %s is answered %d: %s", i, probe.HTTPGet.Path, status, text)
			}
		}
		status, text := ask(t, trusting, url+monitor.Path, scraper, "")
		expect(t, status == http.StatusOK && strings.Contains(text, "weir_ready 1"),
			"weir-%d: Prometheus is answered %d: %.200s", i, status, text)
		for _, c := range []struct {
			what, path, token, body string
			want                    int
		}{
			{"a scrape without a token", monitor.Path, "", "", http.StatusUnauthorized},
			{"a check without a token", "/v1/check", "", `{"policy":"login","key":"a"}`, http.StatusUnauthorized},
			{"a check with a wrong token", "/v1/check", "weir_wrong", `{"policy":"login","key":"a"}`,
				http.StatusUnauthorized},
			{"a check by Prometheus", "/v1/check", scraper, `{"policy":"login","key":"a"}`, http.StatusForbidden},
			{"a scrape by a caller", monitor.Path, token("caller"), "", http.StatusForbidden},
			{"a reset by a caller", "/v1/reset", token("caller"), `{"policy":"login","key":"a"}`, http.StatusForbidden},
		} {
			status, text := ask(t, trusting, url+c.path, c.token, c.body)
			expect(t, status == c.want, "weir-%d: %s is answered %d, want %d: %s", i, c.what, status, c.want, text)
		}
		inline := `{"limit":{"algorithm":"sliding_log","limit":5,"window":"1m"},"key":"a"}`
		status, text = ask(t, trusting, url+"/v1/check", token("operator"), inline)
		expect(t, status >= 400 && status < 500, "weir-%d: a limit sent along is answered %d: %s", i, status, text)
		status, text = ask(t, http.DefaultClient, "http://"+n.http+"/healthz", "", "")
		expect(t, status == http.StatusBadRequest, "weir-%d answers plain text with %d: %s", i, status, text)
	}

	// The command, as the README has it.
	out, err := runWeir(t, "status", "--addr", nodes[0].grpc, "--tls-ca-file",
		filepath.Join(secrets, "authorities", "callers.crt"),
		"--tls-server-name", "weir", "--token-file", filepath.Join(secrets, "tokens", "operator"))
	expect(t, err == nil && strings.Count(out, " active ") == 3, "weir status: %v\n%s", err, out)
	out, err = runWeir(t, "status", "--addr", nodes[0].grpc, "--tls-ca-file",
		filepath.Join(secrets, "authorities", "callers.crt"), "--tls-server-name", "weir")
	expect(t, err != nil, "weir status without a token:\n%s", out)

	// One limit over all three, which talk over mutual TLS.
	admitted := 0
	for i := range 9 {
		status, text := ask(t, trusting, "https://"+nodes[i%3].http+"/v1/check", token("caller"),
			`{"policy":"login","key":"alice"}`)
		var d struct {
			Allowed      bool `json:"allowed"`
			FailedClosed bool `json:"failed_closed"`
		}
		err := json.Unmarshal([]byte(text), &d)
		expect(t, err == nil && !d.FailedClosed && (status == http.StatusOK || status == http.StatusTooManyRequests),
			"weir-%d: a check is answered %d: %s (%v)", i%3, status, text, err)
		if d.Allowed {
			admitted++
		}
	}
	expect(t, admitted == 5, "%d of 9 admitted, the limit is 5 a minute", admitted)

	// Who has no certificate of the nodes' authority is no node, though it has the gossip's key and the cluster's
	// secret.
	if conn, err := tls.Dial("tcp", nodes[0].peer,
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}); err == nil {
		noError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
		_, err = conn.Read(make([]byte, 1))
		expect(t, err != nil, "a node speaks with one that has no certificate")
		conn.Close()
	}

	nodes[2].stop(t)
	log := nodes[2].log.String()
	expect(t, !strings.Contains(log, "hand-over incomplete") && !strings.Contains(log, "unknown settings") &&
		!strings.Contains(log, "unprotected"), "weir-2 says\n%s", log)
	if status, text := ask(t, trusting, "https://"+nodes[0].http+"/v1/check", token("caller"),
		`{"policy":"login","key":"alice"}`); status != http.StatusTooManyRequests {
		t.Errorf("after weir-2 has left, a check beyond the limit is answered %d: %s", status, text)
	}
}

// process is a node that runs.
type process struct {
	cmd              *exec.Cmd
	ready            chan string
	ended            chan struct{}
	log              *buffer
	http, grpc, peer string
}

// buffer is a log that is written and read at the same time.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// start starts a node with settings in its environment, as a pod has them.
func start(t *testing.T, s settings) *process {
	t.Helper()
	file, err := weir()
	noError(t, err)
	p := &process{cmd: exec.Command(file, "run"), ready: make(chan string, 1), ended: make(chan struct{}),
		log: new(buffer)}
	for name, value := range s {
		p.cmd.Env = append(p.cmd.Env, "WEIR_"+strings.ToUpper(strings.ReplaceAll(name, "-", "_"))+"="+value)
	}
	p.cmd.Stderr = p.log
	stdout := value(p.cmd.StdoutPipe())(t)
	noError(t, p.cmd.Start())
	go func() {
		defer close(p.ended)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			if line := lines.Text(); strings.HasPrefix(line, "weir ready ") {
				p.ready <- line
			}
		}
		_ = p.cmd.Wait() // its status is looked at where it matters
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // which fails when it has ended
		<-p.ended
	})
	return p
}

func (p *process) waitReady(t *testing.T) {
	t.Helper()
	select {
	case line := <-p.ready:
		for _, field := range strings.Fields(line) {
			switch name, value, _ := strings.Cut(field, "="); name {
			case "http":
				p.http = value
			case "grpc":
				p.grpc = value
			case "peer":
				p.peer = value
			}
		}
	case <-p.ended:
		t.Fatalf("a node has ended:\n%s", p.log)
	case <-time.After(3 * time.Minute):
		t.Fatalf("a node is not ready after three minutes:\n%s", p.log)
	}
}

// stop ends a node as Kubernetes does.
func (p *process) stop(t *testing.T) {
	t.Helper()
	noError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	<-p.ended
	status := p.cmd.ProcessState.ExitCode()
	expect(t, status == 0, "it ended with status %d:\n%s", status, p.log)
}

func client(config *tls.Config) *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config}, Timeout: time.Minute}
}

// ask returns status and text of an answer: to a POST where there is a body.
func ask(t *testing.T, c *http.Client, url, token, body string) (int, string) {
	t.Helper()
	method := http.MethodGet
	if body != "" {
		method = http.MethodPost
	}
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	noError(t, err)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp := value(c.Do(req))(t)
	defer resp.Body.Close()
	text := value(io.ReadAll(resp.Body))(t)
	return resp.StatusCode, string(text)
}
