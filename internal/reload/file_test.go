package reload

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestRead(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "file")
	if err := os.WriteFile(name, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(name, link); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{name, link} {
		if got, err := ReadFile(file, 5); err != nil || string(got) != "12345" {
			t.Errorf("%s: %q, %v", file, got, err)
		}
	}
	if _, err := ReadFile(name, 4); err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "than the 4 bytes") {
		t.Errorf("one byte more than allowed: %v", err)
	}
	if got, err := ReadPrefix(name, 3); err != nil || string(got) != "123" {
		t.Errorf("prefix: %q, %v", got, err)
	}
	if _, err := ReadFile(filepath.Join(dir, "none"), 5); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}

// TestNotRegular: nothing is waited for, although nobody writes to the pipe.
func TestNotRegular(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, kind := range map[string]string{pipe: "pipe", dir: "directory", os.DevNull: "device"} {
		_, err := ReadFile(name, 5)
		if !errors.Is(err, ErrNotRegular) || !strings.Contains(err.Error(), kind) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
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
	if !errors.Is(err, ErrTimeout) || !strings.Contains(err.Error(), "file") {
		t.Errorf("got %v", err)
	}
	close(free)
	<-ended
}

func TestReadableByOthers(t *testing.T) {
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for mode, want := range map[os.FileMode]bool{0o600: false, 0o640: false, 0o440: false, 0o644: true, 0o604: true, 0o666: true} {
		if err := os.Chmod(name, mode); err != nil {
			t.Fatal(err)
		}
		if got, err := ReadableByOthers(name); got != want || err != nil {
			t.Errorf("%v: %t, %v", mode, got, err)
		}
	}
	if _, err := ReadableByOthers(name + "x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}
