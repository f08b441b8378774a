package cluster

import (
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// FuzzParseKeys: whatever a file of gossip keys holds, its keys are of the sizes of AES, or there is an error
// that names the file and does not repeat a line.
func FuzzParseKeys(f *testing.F) {
	for _, file := range []string{
		"", "\n", "MDEyMzQ1Njc4OWFiY2RlZg==\n", "MDEyMzQ1Njc4OWFiY2RlZg==\nMDEyMzQ1Njc4OWFiY2RlZg==\n",
		"# keys\nMDEyMzQ1Njc4OWFiY2RlZg==",
		"c2hvcnQ=\n", "not base64\n", "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3\r\n", "\xff\n",
	} {
		f.Add(file)
	}
	f.Fuzz(func(t *testing.T, file string) {
		keys, err := ParseKeys("keys.txt", []byte(file))
		if err != nil {
			expect.True(t, strings.HasPrefix(err.Error(), "keys.txt"), "the file is not named: %v", err)
			for line := range strings.Lines(file) {
				line = strings.TrimSpace(line)
				expect.True(t, len(line) < 16 || !strings.Contains(err.Error(), line), "a line is repeated: %v", err)
			}
			return
		}
		for _, k := range keys {
			n := len(k)
			expect.True(t, n == 16 || n == 24 || n == 32, "a key of %d bytes", n)
		}
		expect.True(t, len(keys) != 0, "no key and no error")
	})
}
