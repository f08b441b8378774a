// Package testkit has what tests of several packages share: waiting for a condition, checking that goroutines have
// ended, reading a log while it is written. It is for tests only, and may change.
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

// Patience bounds how long a test waits for a condition, also on a busy machine. A test that passes does not wait so
// long.
const Patience = time.Minute

// Parallel lets n tests that call t.Parallel run at a time, unless -parallel is given, and returns the number in force.
// It is for a TestMain whose tests wait more than they compute: as many tests as processors would leave these idle.
func Parallel(n int) int {
	flag.Parse()
	flag.Visit(func(f *flag.Flag) {
		if f.Name == "test.parallel" {
			n = f.Value.(flag.Getter).Get().(int)
		}
	})
	_ = flag.Set("test.parallel", strconv.Itoa(n)) // every test has this flag, and it takes a number
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

// Eventually waits until ok returns true, which other goroutines bring about. It ends the test if that takes longer
// than Patience.
func Eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	must.True(t, until(ok), "waited in vain: %s", what)
}

// NoLeaks fails the test if goroutines whose stacks contain one of the texts outlive the cleanups that are registered
// after this call. So it must be called first. Goroutines that run tests do not count.
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
	if !until(func() bool { return len(left()) == 0 }) { // goroutines of an earlier test may be ending
		t.Fatalf("goroutines of an earlier test:\n%s", strings.Join(left(), "\n\n"))
	}
	t.Cleanup(func() {
		if !until(func() bool { return len(left()) == 0 }) {
			t.Errorf("goroutines are left:\n%s", strings.Join(left(), "\n\n"))
		}
	})
}

// WriteFile writes a file into a temporary directory of the test, and returns its path.
func WriteFile(t testing.TB, name, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	must.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// Table runs a test for each line "left => right" of a file. It leaves out empty lines and lines that begin with #.
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
