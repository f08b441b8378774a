package deploy

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// weir builds the binary of this tree once for all tests.
var weir = sync.OnceValues(func() (string, error) {
	file := filepath.Join(scratch, "weir")
	out, err := exec.Command("go", "build", "-C", "..", "-o", file, "./cmd/weir").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build ./cmd/weir: %w\n%s", err, out)
	}
	return file, nil
})

// scratch is a directory for what tests share.
var scratch string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		var err error
		if scratch, err = os.MkdirTemp("", "weir-deploy-"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(scratch)
		return m.Run()
	}())
}

// runWeir returns what the binary says.
func runWeir(t *testing.T, args ...string) (string, error) {
	t.Helper()
	file, err := weir()
	noError(t, err)
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), file, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return out.String(), err
}

// settings are those of a node, by the names of the flags.
type settings map[string]string

// settingsOf turns variables of the environment into settings. Variables that are none, such as GOMEMLIMIT, are left
// out.
func settingsOf(env map[string]string) settings {
	s := make(settings)
	for name, value := range env {
		if flag, ok := strings.CutPrefix(name, "WEIR_"); ok {
			s[strings.ToLower(strings.ReplaceAll(flag, "_", "-"))] = value
		}
	}
	return s
}

// podFields are what the API server tells a pod about itself.
var podFields = map[string]string{"metadata.name": "weir-0", "status.podIP": "10.0.0.1"}

// podSettings are the settings of the pod weir-0.
func podSettings(t *testing.T, c corev1.Container) settings {
	t.Helper()
	env := make(map[string]string)
	for _, e := range c.Env {
		value := e.Value
		if from := e.ValueFrom; from != nil {
			if from.FieldRef == nil || podFields[from.FieldRef.FieldPath] == "" {
				t.Errorf("the test does not know the value of %s", e.Name)
				continue
			}
			value = podFields[from.FieldRef.FieldPath]
		}
		_, twice := env[e.Name]
		expect(t, !twice, "%s is given twice", e.Name)
		env[e.Name] = value
	}
	expect(t, slices.Equal(c.Args, []string{"run"}) && c.Command == nil,
		"the container runs %q %q, want the image's entry point with run", c.Command, c.Args)
	return settingsOf(env)
}

// takes asks the binary whether it knows each setting and takes its value. With --help last it reads them all, and then
// does nothing.
func (s settings) takes(t *testing.T) {
	t.Helper()
	args := []string{"run"}
	for _, name := range slices.Sorted(maps.Keys(s)) {
		args = append(args, "--"+name+"="+s[name])
	}
	out, err := runWeir(t, append(args, "--help")...)
	expect(t, err == nil, "weir %s: %v\n%s", strings.Join(args, " "), err, out)
}

// TestTakes: the check above does fail.
func TestTakes(t *testing.T) {
	for _, wrong := range []string{"--no-such-setting=1", "--http-port=http", "--grace=40"} {
		out, err := runWeir(t, "run", wrong, "--help")
		expect(t, err != nil, "weir run takes %s:\n%s", wrong, out)
	}
}

// validate asks the binary what it thinks of a policy file.
func validate(t *testing.T, text string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "policies.yaml")
	noError(t, os.WriteFile(file, []byte(text), 0o600))
	out, err := runWeir(t, "validate", file)
	expect(t, err == nil, "%v\n%s", err, out)
	expect(t, strings.Contains(text, "- name:"), "there is no sample policy")
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	noError(t, err)
	return data
}
