package reload

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "file")
	must.NoError(t, os.WriteFile(name, []byte("12345"), 0o600))
	link := filepath.Join(dir, "link")
	must.NoError(t, os.Symlink(name, link))
	for _, file := range []string{name, link} {
		got, err := ReadFile(file, 5)
		expect.True(t, err == nil && string(got) == "12345", "%s: %q, %v", file, got, err)
	}
	_, err := ReadFile(name, 4)
	expect.True(t, err != nil && strings.Contains(err.Error(), name) &&
		strings.Contains(err.Error(), "than 4 bytes"), "one byte more than allowed: %v", err)
	got, err := ReadPrefix(name, 3)
	expect.True(t, err == nil && string(got) == "123", "prefix: %q, %v", got, err)
	_, err = ReadFile(filepath.Join(dir, "none"), 5)
	expect.ErrorIs(t, err, os.ErrNotExist, "no file")
}

// TestNotRegular: nothing is waited for, although nobody writes to the pipe.
func TestNotRegular(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	must.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for name, kind := range map[string]string{pipe: "prw", dir: "directory", os.DevNull: "Dcrw"} {
		_, err := ReadFile(name, 5)
		expect.True(t, errors.Is(err, ErrNotRegular) && strings.Contains(err.Error(), kind) &&
			strings.Contains(err.Error(), name), "%s: %v", name, err)
	}
}

// TestHang: a read that does not end is left behind, and can end later.
func TestHang(t *testing.T) {
	free, ended := make(chan struct{}), make(chan struct{})
	_, err := within("file", time.Millisecond, func() ([]byte, error) {
		defer close(ended)
		<-free
		return nil, nil
	})
	expect.True(t, errors.Is(err, ErrTimeout) && strings.Contains(err.Error(), "file"), "got %v", err)
	close(free)
	<-ended
}
