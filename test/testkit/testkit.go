// Package testkit holds what tests of several packages need: waiting for a condition, goroutines that must have ended, a log
// that is read while it is written. It is for tests only, and does not promise to stay as it is.
package testkit

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/must"

	"github.com/weirlimit/weir/test/expect"
)

// Patience is how long a test waits for what must happen: long enough for a machine that does much else. It is never waited for when
// all is well.
const Patience = 2 * time.Minute

// Parallel lets n tests at a time run that call t.Parallel, where -parallel does not say how many, and returns how many it is. It is for a
// TestMain whose tests wait more than they compute, of which as many as there are processors would leave these idle.
func Parallel(n int) int {
	flag.Parse()
	flag.Visit(func(f *flag.Flag) {
		if f.Name == "test.parallel" {
			n = f.Value.(flag.Getter).Get().(int)
		}
	})
	_ = flag.Set("test.parallel", strconv.Itoa(n)) // which every test has, and takes a number
	return n
}

// until calls ok every millisecond until it returns true, for Patience at most.
func until(ok func() bool) bool {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(Patience); !ok(); <-tick.C {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// Eventually waits for a condition that other goroutines bring about, and ends the test where it does not come.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	must.True(t, until(ok), "waited in vain: %s", what)
}

// NoLeaks fails the test when goroutines whose stacks have one of the texts outlive everything that is cleaned up after this
// call, and so must come first. Goroutines that run tests do not count.
func NoLeaks(t testing.TB, texts ...string) {
	t.Helper()
	left := func() (list []string) {
		buf := make([]byte, 1<<20)
		for g := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			for _, text := range texts {
				if strings.Contains(g, text) && !strings.Contains(g, "testing.tRunner(") {
					list = append(list, g)
					break
				}
			}
		}
		return list
	}
	if !until(func() bool { return len(left()) == 0 }) { // some may be about to end
		t.Fatalf("goroutines of an earlier test:\n%s", strings.Join(left(), "\n\n"))
	}
	t.Cleanup(func() {
		if !until(func() bool { return len(left()) == 0 }) {
			t.Errorf("goroutines are left:\n%s", strings.Join(left(), "\n\n"))
		}
	})
}

// WriteFile writes a file of the given name into a directory of the test's, and returns its path.
func WriteFile(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// Table runs a test for each line "left => right" of a file. Empty lines and those that begin with # are left out.
func Table(t *testing.T, file string, row func(t *testing.T, left, right string)) {
	text := must.Value(os.ReadFile(file))(t)
	rows := 0
	for n, line := range strings.Split(string(text), "\n") {
		if left, right, ok := strings.Cut(line, " => "); ok && !strings.HasPrefix(line, "#") {
			rows++
			t.Run(fmt.Sprintf("line %d", n+1), func(t *testing.T) { row(t, left, right) })
		} else if line != "" && !strings.HasPrefix(line, "#") {
			t.Errorf("%s:%d: no => in %.100s", file, n+1, line)
		}
	}
	expect.True(t, rows != 0, "%s has no rows", file)
}
