package structure

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestNoBinaries: nothing that was built is tracked. Whoever reviews a change cannot read it, and it is in every clone
// for good.
func TestNoBinaries(t *testing.T) {
	const root = "../.."
	out, err := exec.Command("git", "-C", root, "ls-files", "-z").Output()
	if err != nil {
		t.Skipf("this is not a git checkout, or git is missing: %v", err)
	}
	head := make([]byte, 4)
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		f, err := os.Open(filepath.Join(root, name))
		if os.IsNotExist(err) {
			continue // it was removed, and that is not committed yet
		}
		must.NoError(t, err)
		n, _ := f.Read(head) // of an empty file, and of a directory that is another repository, nothing
		f.Close()
		for _, magic := range []string{"\x7fELF", "\xcf\xfa\xed\xfe", "MZ", "!<ar", "PK\x03\x04", "\x1f\x8b"} {
			expect.True(t, !bytes.HasPrefix(head[:n], []byte(magic)),
				"%s is a binary: build it where it is needed", name)
		}
	}
}
