package structure

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// maxArchitecture is how long ARCHITECTURE.md may be, in lines: it is one page. Reasoning belongs in a DESIGN.md beside
// its package.
const maxArchitecture = 150

// TestArchitecture holds ARCHITECTURE.md to one page that names every package.
func TestArchitecture(t *testing.T) {
	text := must.Value(os.ReadFile("../../ARCHITECTURE.md"))(t)
	if lines := strings.Count(string(text), "\n"); lines > maxArchitecture {
		t.Errorf("ARCHITECTURE.md has %d lines, which is more than %d", lines, maxArchitecture)
	}
	_, house, ok := strings.Cut(string(text), "## Packages\n\n```\n")
	must.True(t, ok, "ARCHITECTURE.md has no house")
	house, _, _ = strings.Cut(house, "```")
	words := strings.FieldsFunc(house, func(r rune) bool { return strings.ContainsRune(" \n,;:/", r) })
	for name := range mayImport {
		base := name[strings.LastIndexByte(name, '/')+1:]
		if base == "certstest" || base == "v1" {
			continue // parts of the package above
		}
		expect.True(t, slices.Contains(words, base), "the house in ARCHITECTURE.md does not have %s", name)
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	anchor  = regexp.MustCompile(`<a id="([^"]+)">`)
	fence   = regexp.MustCompile("(?ms)^```.*?^```")
)

// TestLinks follows the links of every document to files of this repository and to headings in them.
func TestLinks(t *testing.T) {
	texts := make(map[string]string)
	read := func(path string) string {
		if _, ok := texts[path]; !ok {
			text := must.Value(os.ReadFile(path))(t)
			texts[path] = fence.ReplaceAllString(string(text), "")
		}
		return texts[path]
	}
	links := 0
	each(t, regexp.MustCompile(`\.md$`), func(path, _ string) {
		for _, m := range link.FindAllStringSubmatch(read(path), -1) {
			if strings.Contains(m[1], "://") || strings.HasPrefix(m[1], "mailto:") {
				continue
			}
			links++
			file, at, _ := strings.Cut(m[1], "#")
			to := path
			if file != "" {
				to = filepath.Join(filepath.Dir(path), filepath.FromSlash(file))
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s: %s is not there", path, m[1])
			} else if at != "" && filepath.Ext(to) == ".md" && !slices.Contains(anchors(read(to)), at) {
				t.Errorf("%s: %s has no such heading", path, m[1])
			}
		}
	})
	expect.True(t, links >= 100, "%d links were found", links)
}

// anchors are the names under which the headings of a document can be linked to, as GitHub makes them.
func anchors(text string) (names []string) {
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		var name strings.Builder
		for _, r := range strings.ToLower(m[1]) {
			switch {
			case r == ' ' || r == '-':
				name.WriteByte('-')
			case r == '_', r >= 'a' && r <= 'z', r >= '0' && r <= '9', r > 127:
				name.WriteRune(r)
			}
		}
		names = append(names, name.String())
	}
	for _, m := range anchor.FindAllStringSubmatch(text, -1) {
		names = append(names, m[1])
	}
	return names
}
