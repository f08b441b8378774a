package policy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/internal/strictyaml"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// content is a file with one policy whose limit is n.
func content(n int) string { return fmt.Sprintf("policies: [{name: p, limits: [%d/1s]}]\n", n) }

func limitOf(t *testing.T, s *Set) int64 {
	t.Helper()
	return mustGet(t, s, "p").Limits[0].Limit
}

func write(t *testing.T, file, text string) {
	t.Helper()
	must.NoError(t, os.WriteFile(file, []byte(text), 0o600))
}

// TestWatch: policies that are right come into force; those with mistakes, and those that Check refuses, do not.
func TestWatch(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policies.yaml")
	changes, errs := make(chan *Set, 10), make(chan error, 10)
	cfg := WatchConfig{
		Check: func(s *Set) error {
			if limit := limitOf(t, s); limit > 9 {
				return fmt.Errorf("%d is too much", limit)
			}
			return nil
		},
		OnChange: func(s *Set) { changes <- s },
		OnError:  func(err error) { errs <- err },
	}
	write(t, file, content(10))
	_, err := NewWatcher(file, cfg)
	must.True(t, err != nil && err.Error() == "10 is too much", "begins with 10: %v", err)
	write(t, file, content(1))
	w, err := NewWatcher(file, cfg)
	must.NoError(t, err)
	w.Watch()
	failure := func(part string) error {
		t.Helper()
		select {
		case err := <-errs:
			if !strings.Contains(err.Error(), part) || w.Err() == nil || limitOf(t, w.Current()) != 1 {
				t.Fatalf("got %v (%v), want %s", err, w.Err(), part)
			}
			return err
		case <-time.After(20 * time.Second):
			t.Fatalf("no error with %s", part)
		}
		return nil
	}
	write(t, file, content(11))
	failure("11 is too much")
	write(t, file, "policies: 1\n") // which Check is not asked about
	var list Errors
	err = failure(file + ":1:11: policies: must be a list of policies, not the number 1")
	expect.True(t, errors.As(err, &list), "%T", err)
	write(t, file, content(9))
	if s := <-changes; limitOf(t, s) != 9 || w.Err() != nil || w.Current() != s {
		t.Errorf("%d, %v", limitOf(t, s), w.Err())
	}
	w.Close()
	write(t, file, strings.Repeat("#", strictyaml.MaxFile+1))
	_, err = NewWatcher(file, cfg)
	expect.ErrorContains(t, err, "too large")
}
