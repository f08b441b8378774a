package structure

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestNotice: NOTICE lists the modules in the binary that are under the Mozilla Public License, whose recipients must
// be told where the source is, and no others.
func TestNotice(t *testing.T) {
	cmd := exec.Command("go", "list", "-deps", "-f", "{{with .Module}}{{.Path}} {{.Version}} {{.Dir}}{{end}}",
		"./cmd/node")
	cmd.Dir = "../.."
	out := must.Value(cmd.Output())(t)
	var want []string
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) != 3 { // the standard library's, and our own
			continue
		}
		if name := f[0] + " " + f[1]; !slices.Contains(want, name) && isMPL(t, f[2]) {
			want = append(want, name)
		}
	}
	must.True(t, len(want) != 0, "no module is under the MPL; memberlist is")
	notice := must.Value(os.ReadFile("../../NOTICE"))(t)
	var got []string
	for line := range strings.Lines(string(notice)) {
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[2], "https://") {
			got = append(got, f[0]+" "+f[1])
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	expect.True(t, slices.Equal(got, want),
		"NOTICE lists\n%s\nthe binary has\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
}

func isMPL(t *testing.T, dir string) bool {
	t.Helper()
	files := must.Value(filepath.Glob(filepath.Join(dir, "LICEN[CS]E*")))(t)
	for _, file := range files {
		text := must.Value(os.ReadFile(file))(t)
		if bytes.Contains(text, []byte("Mozilla Public License")) {
			return true
		}
	}
	return false
}
