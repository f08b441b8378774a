package structure

import (
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// functions are the names of the test functions of the repository, those of other modules in it too.
func functions(t *testing.T) map[string]bool {
	t.Helper()
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark|Example)\w*)\(`)
	names := make(map[string]bool)
	each(t, regexp.MustCompile(`_test\.go$`), func(_, text string) {
		for _, m := range declared.FindAllStringSubmatch(text, -1) {
			names[m[1]] = true
		}
	})
	return names
}

// each calls f with the name and text of every file of the repository whose name matches.
func each(t *testing.T, match *regexp.Regexp, f func(name, text string)) {
	t.Helper()
	err := filepath.WalkDir("../..", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			if d.Name() == ".git" {
				return filepath.SkipDir
			}
			return nil
		case !match.MatchString(name):
			return nil
		}
		text, err := os.ReadFile(name)
		if err == nil {
			f(name, string(text))
		}
		return err
	})
	must.NoError(t, err)
}

// named are the test functions that a text names.
var named = regexp.MustCompile(`(-(?:run|skip|bench) '?)?\b((?:Test|Fuzz|Benchmark)[A-Z]\w*)(…)?`)

// TestNamedTests: every test that the documents, or the steps of CI, name is there: what is promised with a test's name
// can be looked up, and a test that is renamed is renamed there too.
func TestNamedTests(t *testing.T) {
	functions, seen := functions(t), 0
	each(t, regexp.MustCompile(`\.md$|/\.ci/run$|/Makefile$`), func(name, text string) {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			function := m[2]
			known := functions[function]
			if m[1] != "" || m[3] != "" { // the beginning of names
				known = slices.ContainsFunc(slices.Collect(maps.Keys(functions)),
					func(f string) bool { return strings.HasPrefix(f, function) })
			}
			seen++
			expect.True(t, known, "%s names %s, which does not exist", name, function)
		}
	})
	expect.True(t, seen >= 50, "found %d names of tests in documents", seen)
}

// TestWhoCanDoWhat: every row of the table of that name in docs/security.md names a test, and there is a row for
// everyone whom it is about.
func TestWhoCanDoWhat(t *testing.T) {
	data := must.Value(os.ReadFile("../../docs/security.md"))(t)
	_, section, _ := strings.Cut(string(data), "\n## Who can do what\n")
	section, _, _ = strings.Cut(section, "\n## ")
	missing := map[string]bool{}
	for _, who := range []string{
		"stranger, HTTP port", "stranger, gRPC port", "stranger, Redis port", "stranger, peer port",
		"stranger, gossip port", "stranger, debug port",
		"role `check`", "role `refund`", "role `read`", "role `topology`", "role `admin`", "a tenant",
		"stolen token", "stolen caller's certificate", "stolen gossip key", "stolen node certificate",
		"stolen cluster secret",
	} {
		missing[who] = true
	}
	for row := range strings.Lines(section) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(row), "|"), " | ")
		if !strings.HasPrefix(row, "| ") || strings.HasPrefix(row, "| who ") || strings.HasPrefix(row, "| ---") {
			continue
		}
		if len(cells) != 4 {
			t.Errorf("%d cells, not who, can, cannot, tests: %s", len(cells), row)
			continue
		}
		expect.True(t, named.MatchString(cells[3]), "names no test: %s", row)
		delete(missing, strings.TrimSpace(cells[0]))
	}
	for _, who := range slices.Sorted(maps.Keys(missing)) {
		t.Errorf("there is no row for: %s", who)
	}
}
