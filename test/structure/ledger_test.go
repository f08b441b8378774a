package structure

import (
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var update = flag.Bool("update", false, "write what TestLedger counts into ledger.txt")

const (
	ledgerFile   = "ledger.txt"
	maxWidth     = 120 // columns; a wider line of code counts as two
	maxBodyLines = 60  // of a function
)

// TestLedger holds the size of the project to ledger.txt: code lines of each package and of the tests, functions of more
// than 60 lines, lines of more than 120 columns, words of Markdown. A number that rises fails; -update writes the
// numbers, and the commit says what the rise buys.
func TestLedger(t *testing.T) {
	counted := count(t)
	if *update {
		must.NoError(t, os.WriteFile(ledgerFile, []byte(render(counted)), 0o666))
		return
	}
	text := must.Value(os.ReadFile(ledgerFile))(t)
	allowed := map[string]int{}
	for line := range strings.Lines(string(text)) {
		var n int
		var name string
		_, err := fmt.Sscanf(line, "%d %q", &n, &name)
		must.NoError(t, err, "%s has the line %q", ledgerFile, line)
		allowed[name] = n
	}
	for _, name := range slices.Sorted(maps.Keys(counted)) {
		n := counted[name]
		expect.True(t, n <= allowed[name],
			"%s has %d, and %s allows %d: make it smaller, or run the test with -update and say what the rise buys",
			name, n, ledgerFile, allowed[name])
	}
}

// count returns code lines by package ("product/PACKAGE", "tests/DIRECTORY"), body lines of long functions
// ("function/FILE NAME"), and the words of all Markdown.
func count(t *testing.T) map[string]int {
	t.Helper()
	n := map[string]int{}
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "node_modules"):
			return filepath.SkipDir
		case d.IsDir():
			return nil
		}
		name := filepath.ToSlash(strings.TrimPrefix(path, filepath.Join("..", "..")+string(filepath.Separator)))
		switch filepath.Ext(name) {
		case ".md":
			text, err := os.ReadFile(path)
			n["words of Markdown"] += len(strings.Fields(string(text)))
			return err
		case ".go":
			return countGo(n, name, path)
		}
		return nil
	})
	must.NoError(t, err)
	return n
}

func countGo(n map[string]int, name, path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	files := token.NewFileSet()
	f, err := parser.ParseFile(files, name, text, parser.ParseComments)
	if err != nil || ast.IsGenerated(f) {
		return err
	}
	lines := codeLines(string(text))
	for line := range strings.Lines(string(text)) {
		if wide(line) {
			n["lines over 120 columns"]++
		}
	}
	parts := strings.Split(name, "/")
	if strings.HasSuffix(name, "_test.go") || parts[0] == "test" {
		n["tests"] += lines
		n["tests/"+parts[0]] += lines
		return nil
	}
	group := parts[0]
	switch {
	case len(parts) == 1:
		group = "(root)"
	case group == "internal" || group == "gateway":
		group += "/" + parts[1]
		n["product/"+parts[0]] += lines
	}
	n["product"] += lines
	n["product/"+group] += lines
	for _, d := range f.Decls {
		fn, ok := d.(*ast.FuncDecl)
		if !ok || fn.Body == nil {
			continue
		}
		body := files.Position(fn.Body.Rbrace).Line - files.Position(fn.Body.Lbrace).Line - 1
		if body > maxBodyLines {
			n["functions over 60 lines"]++
			n["function/"+name+" "+fn.Name.Name] = body
		}
	}
	return nil
}

// wide reports whether a line is too wide, with 4 columns for a tab. What is too wide today is strings that cannot be
// broken.
func wide(line string) bool {
	return utf8.RuneCountInString(strings.ReplaceAll(strings.TrimRight(line, "\n"), "\t", "    ")) > maxWidth
}

// codeLines counts the lines of a Go file that are neither blank nor comments.
func codeLines(text string) (n int) {
	comment := false
	for line := range strings.Lines(text) {
		bare := strings.TrimSpace(line)
		switch {
		case comment:
			comment = !strings.Contains(bare, "*/")
		case strings.HasPrefix(bare, "/*"):
			comment = !strings.Contains(bare, "*/")
		case bare == "" || strings.HasPrefix(bare, "//"):
		case wide(line):
			n += 2
		default:
			n++
		}
	}
	return n
}

func render(counted map[string]int) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(counted)) {
		fmt.Fprintf(&b, "%6d %q\n", counted[name], name)
	}
	return b.String()
}

func TestCodeLines(t *testing.T) {
	wide := "\tx := \"" + strings.Repeat("é", maxWidth) + "\"\n"
	for text, want := range map[string]int{
		"":                                 0,
		"package p\n\n// c\n":              1,
		"/* a\nb */\nvar x = 1 // c\n":     1,
		"/* a */\nvar x = 1\n":             1,
		"var x = 1 /* a */\n" + wide:       3,
		strings.Repeat("\tx++\n", 3) + "}": 4,
	} {
		expect.Equal(t, codeLines(text), want, "codeLines(%q)", text)
	}
	_, err := os.Stat(ledgerFile)
	expect.True(t, !errors.Is(err, fs.ErrNotExist), "%s is missing", ledgerFile)
}
