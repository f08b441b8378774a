package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

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
	if ok || err == nil || !strings.HasPrefix(err.Error(), "FILE: ") || !strings.Contains(err.Error(), "/none") {
		t.Errorf("%t, %v", ok, err)
	}
	if text := out.String(); strings.Count(text, bad+":") < 2 || !strings.Contains(text, strict+": ok, 1 policy\n") {
		t.Errorf("printed %s", text)
	}
	if text := warned.String(); !strings.HasPrefix(text, "warning: "+strict+":") || strings.Contains(out.String(), "voters") {
		t.Errorf("warned %s", text)
	}

	out.Reset()
	if ok, err := validateFiles(&out, &warned, files, validateOptions{JSON: true}); ok || err == nil {
		t.Errorf("as JSON: %t, %v", ok, err)
	}
	var told struct {
		OK                 bool
		Mistakes, Warnings []struct {
			File, Field string
			Line        int
		}
	}
	if err := json.Unmarshal(out.Bytes(), &told); err != nil || told.OK || len(told.Mistakes) < 2 || len(told.Warnings) != 1 {
		t.Fatalf("%+v, %v", told, err)
	}
	if m, w := told.Mistakes[0], told.Warnings[0]; m.File != bad || m.Line != 1 || m.Field != "policies[0].limit" || w.File != strict {
		t.Errorf("%+v, %+v", m, w)
	}
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
	before, err := os.ReadFile(made)
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := validateFiles(&out, &out, []string{dir}, validateOptions{}); !ok || err != nil {
		t.Errorf("what was written: %t, %v\n%s", ok, err, &out)
	}
	if err := os.WriteFile(made, append(before, "# edited\n"...), 0o600); err != nil {
		t.Fatal(err)
	}
	if ok, err := validateFiles(&out, &out, []string{foreign}, validateOptions{Convert: dir}); ok || err == nil || !strings.HasPrefix(err.Error(), "FILE: convert: ") {
		t.Errorf("once more: %t, %v", ok, err)
	}
	if after, err := os.ReadFile(made); err != nil || !strings.HasSuffix(string(after), "# edited\n") {
		t.Errorf("%s, %v", after, err)
	}
}

// TestEmptyDirectory: a directory without files is right, and says so.
func TestEmptyDirectory(t *testing.T) {
	dir := t.TempDir()
	var out bytes.Buffer
	if ok, err := validateFiles(&out, &out, []string{dir}, validateOptions{}); !ok || err != nil || out.String() != dir+": ok, no files\n" {
		t.Errorf("%t, %v, %s", ok, err, &out)
	}
}
