package mutants

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/must"
)

// mutant is a rule that is left out or broken.
type mutant struct {
	name  string // package, then what is wrong with it
	file  string // that is edited
	edits []edit
	test  string // package and arguments of the go test that fails
	says  string // what it says then
}

// edit puts a text in the place of another, which the file has once.
type edit struct{ from, to string }

var (
	all   = flag.Bool("mutants", false, "compile every mutant and run its test: minutes of all cores")
	parts = flag.Int("parts", 1, "with -mutants: how many parts the mutants are divided into, of which one is run")
	part  = flag.Int("part", 0, "with -mutants: which part is run, counted from 0")
)

// TestMutants runs the test of every mutant on it; without -mutants,
// and for those of other parts, it only sees to it that every mutant still can be made.
func TestMutants(t *testing.T) {
	if raceEnabled {
		t.Skip("the tests that are run are others, without the race detector")
	}
	root := must.Value(filepath.Abs("../.."))(t)
	must.True(t, *parts >= 1 && *part >= 0 && *part < *parts, "there is no part %d of %d", *part, *parts)
	for i, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			if !*all || i%*parts != *part {
				m.source(t, root)
				return
			}
			out, err := m.run(t, root)
			var exit *exec.ExitError
			switch {
			case err != nil && !errors.As(err, &exit):
				t.Fatal(err)
			case strings.Contains(out, "[build failed]") || strings.Contains(out, "[setup failed]"):
				t.Errorf("it does not compile:\n%s", out)
			case err == nil:
				t.Errorf("it is not noticed by go test %s:\n%s", m.test, out)
			case !strings.Contains(out, m.says):
				t.Errorf("go test %s does not say %q:\n%s", m.test, m.says, out)
			default:
				t.Log(out)
			}
		})
	}
}

// source is the edited file, which stands in for the one at path.
func (m *mutant) source(t *testing.T, root string) (path, text string) {
	path = filepath.Join(root, m.file)
	source := must.Value(os.ReadFile(path))(t)
	text = string(source)
	for _, e := range m.edits {
		n := strings.Count(text, e.from)
		must.True(t, n == 1, "%s has this %d times; once is wanted:\n%s", m.file, n, e.from)
		text = strings.Replace(text, e.from, e.to, 1)
	}
	return path, text
}

// run runs the mutant's test with the file edited.
func (m *mutant) run(t *testing.T, root string) (string, error) {
	path, text := m.source(t, root)
	dir := t.TempDir()
	edited, overlay := filepath.Join(dir, filepath.Base(m.file)), filepath.Join(dir, "overlay.json")
	must.NoError(t, os.WriteFile(edited, []byte(text), 0o644))
	list := must.Value(json.Marshal(map[string]map[string]string{"Replace": {path: edited}}))(t)
	must.NoError(t, os.WriteFile(overlay, list, 0o644))
	args := append([]string{"test", "-overlay", overlay, "-vet=off", "-count=1", "-timeout=5m"},
		strings.Fields(m.test)...)
	cmd := exec.CommandContext(t.Context(), "go", args...)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	return string(out), err
}
