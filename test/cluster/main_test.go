package clustertest

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

// quiet says that this machine does nothing else.
var quiet = flag.Bool("quiet", false,
	"run the tests of overload, memory and rolling updates too, and hold nodes to times, on a machine that does nothing else")

// needsQuiet is for tests that load a machine with more than it can do, or hold nodes to the times that manifests give
// them.
func needsQuiet(t *testing.T) {
	t.Helper()
	if !*quiet {
		t.Skip("must have this machine to itself, for its load or for its times: -quiet")
	}
}

// long says that this run has time.
var long = flag.Bool("long", false, "run the tests that take the most processor time too")

// needsTime is for tests that go test ./... has no time for.
func needsTime(t *testing.T) {
	t.Helper()
	if !*long {
		t.Skip("takes half a minute of processor time or more: -long")
	}
}

// buildDir is where the binary goes. TestMain makes and removes it.
var buildDir string

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == borrowerCommand {
		if err := runBorrower(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 3 && os.Args[1] == clientsCommand {
		if err := runClients(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testkit.Parallel(6) // clusters of processes, most of which wait
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "weir-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // some nodes run as nobody in particular
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	buildDir = dir
	return m.Run()
}

// build makes the binary when the first test needs it: a run that is only to list or skip tests does not wait for it.
var build = sync.OnceValues(func() (string, error) {
	if err := lookAtSources(); err != nil {
		return "", err
	}
	binary := filepath.Join(buildDir, "weir")
	args := []string{"build", "-o", binary}
	if raceEnabled {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, "github.com/weirlimit/weir/cmd/node")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return binary, nil
})

// binary returns the path of the binary under test.
func binary(t *testing.T) string {
	t.Helper()
	return must.Value(build())(t)
}

// lookAtSources looks at every file of the module. The go command remembers which files a test looked at, and runs it
// again when one of them has changed; of what the binary is built from it would otherwise not know.
func lookAtSources() error {
	return filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == ".git":
			return filepath.SkipDir
		case d.IsDir():
			return nil
		}
		// an editor's file may be gone again
		if _, err := os.Stat(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}
