package cluster

import (
	"strings"
	"testing"
)

// FuzzParseKeys: whatever a file of gossip keys holds, its keys are of the sizes of AES, or there is an error
// that names the file and does not repeat a line.
func FuzzParseKeys(f *testing.F) {
	for _, file := range []string{
		"", "\n", "MDEyMzQ1Njc4OWFiY2RlZg==\n", "MDEyMzQ1Njc4OWFiY2RlZg==\nMDEyMzQ1Njc4OWFiY2RlZg==\n", "# keys\nMDEyMzQ1Njc4OWFiY2RlZg==",
		"c2hvcnQ=\n", "not base64\n", "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3\r\n", "\xff\n",
	} {
		f.Add(file)
	}
	f.Fuzz(func(t *testing.T, file string) {
		keys, err := ParseKeys("keys.txt", []byte(file))
		if err != nil {
			if !strings.HasPrefix(err.Error(), "keys.txt") {
				t.Errorf("the file is not named: %v", err)
			}
			for line := range strings.Lines(file) {
				if line = strings.TrimSpace(line); len(line) >= 16 && strings.Contains(err.Error(), line) {
					t.Errorf("a line is repeated: %v", err)
				}
			}
			return
		}
		for _, k := range keys {
			if n := len(k); n != 16 && n != 24 && n != 32 {
				t.Errorf("a key of %d bytes", n)
			}
		}
		if len(keys) == 0 {
			t.Error("no key and no error")
		}
	})
}
