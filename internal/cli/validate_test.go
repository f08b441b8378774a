package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// TestOneBadFileHidesNoOther: every file is checked, whatever is wrong with one, and mistakes, warnings and files that cannot be read
// are told apart.
func TestOneBadFileHidesNoOther(t *testing.T) {
	bad := testkit.WriteFile(t, "bad.yaml", "policies: [{name: a, algorithm: sliding_log, limit: 0, window: 1m}, {name: b}]\n")
	strict := testkit.WriteFile(t, "strict.yaml", "policies: [{name: a, algorithm: sliding_log, limit: 1, window: 1m, durability: sync, consistency: strict}]\n")
	files := []string{"/none", bad, strict}

	var out, warned bytes.Buffer
	ok, err := validateFiles(&out, &warned, files, validateOptions{})
	expect.True(t, !ok && err != nil && strings.HasPrefix(err.Error(), "FILE: ") &&
		strings.Contains(err.Error(), "/none"), "%t, %v", ok, err)
	if text := out.String(); strings.Count(text, bad+":") < 2 || !strings.Contains(text, strict+": ok, 1 policy\n") {
		t.Errorf("printed %s", text)
	}
	text := warned.String()
	expect.True(t, strings.HasPrefix(text, "warning: "+strict+":") && !strings.Contains(out.String(), "voters"),
		"warned %s", text)

	out.Reset()
	ok, err = validateFiles(&out, &warned, files, validateOptions{JSON: true})
	expect.True(t, !ok && err != nil, "as JSON: %t, %v", ok, err)
	var told struct {
		OK                 bool
		Mistakes, Warnings []struct {
			File, Field string
			Line        int
		}
	}
	err = json.Unmarshal(out.Bytes(), &told)
	must.True(t, err == nil && !told.OK && len(told.Mistakes) >= 2 && len(told.Warnings) == 1, "%+v, %v", told, err)
	m, w := told.Mistakes[0], told.Warnings[0]
	expect.True(t, m.File == bad && m.Line == 1 && m.Field == "policies[0].limit" && w.File == strict, "%+v, %+v", m, w)
}

// TestConvert: what is written can be read, and nothing is overwritten.
func TestConvert(t *testing.T) {
	foreign := testkit.WriteFile(t, "limits.yaml", "- {namespace: shop/eu, max_value: 10, seconds: 60, conditions: [], variables: [user]}\n")
	dir := t.TempDir()
	var out bytes.Buffer
	if ok, err := validateFiles(&out, &out, []string{foreign}, validateOptions{Convert: dir}); !ok || err != nil {
		t.Fatalf("%t, %v\n%s", ok, err, &out)
	}
	made := filepath.Join(dir, "shop_eu.yaml")
	before := must.Value(os.ReadFile(made))(t)
	ok, err := validateFiles(&out, &out, []string{dir}, validateOptions{})
	expect.True(t, ok && err == nil, "what was written: %t, %v\n%s", ok, err, &out)
	must.NoError(t, os.WriteFile(made, append(before, "# edited\n"...), 0o600))
	ok, err = validateFiles(&out, &out, []string{foreign}, validateOptions{Convert: dir})
	expect.True(t, !ok && err != nil && strings.HasPrefix(err.Error(), "FILE: convert: "), "once more: %t, %v", ok, err)
	after, err := os.ReadFile(made)
	expect.True(t, err == nil && strings.HasSuffix(string(after), "# edited\n"), "%s, %v", after, err)
}

// TestEmptyDirectory: a directory without files is right, and says so.
func TestEmptyDirectory(t *testing.T) {
	dir := t.TempDir()
	var out bytes.Buffer
	ok, err := validateFiles(&out, &out, []string{dir}, validateOptions{})
	expect.True(t, ok && err == nil && out.String() == dir+": ok, no files\n", "%t, %v, %s", ok, err, &out)
}
