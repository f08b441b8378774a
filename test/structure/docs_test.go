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
	if err != nil {
		t.Fatal(err)
	}
}

// named are the test functions that a text names.
var named = regexp.MustCompile(`(-(?:run|skip|bench) '?)?\b((?:Test|Fuzz|Benchmark)[A-Z]\w*)(…)?`)

// TestNamedTests: every test that the documents, or the steps of CI, name is there: what is promised with a test's name can be
// looked up, and a test that is renamed is renamed there too.
func TestNamedTests(t *testing.T) {
	functions, seen := functions(t), 0
	each(t, regexp.MustCompile(`\.md$|/\.ci/run$|/Makefile$`), func(name, text string) {
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			function := m[2]
			known := functions[function]
			if m[1] != "" || m[3] != "" { // the beginning of names
				known = slices.ContainsFunc(slices.Collect(maps.Keys(functions)), func(f string) bool { return strings.HasPrefix(f, function) })
			}
			if seen++; !known {
				t.Errorf("%s names %s, which does not exist", name, function)
			}
		}
	})
	if seen < 50 {
		t.Errorf("found %d names of tests in documents", seen)
	}
}
