package clustertest

import (
	"errors"
	"flag"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/must"
)

var previousRef = flag.String("previous", "",
	"the `commit` or tag that an upgrade begins from: by default the newest tag v* before this commit")

// previousBuild makes the binary of the release before, from this repository's history.
var previousBuild = sync.OnceValues(func() (binary previousBinary, err error) {
	git := func(args ...string) (string, error) {
		out, err := exec.Command("git", args...).CombinedOutput()
		if err != nil {
			return "", fmt.Errorf("git %s: %w: %s", strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out)), nil
	}
	ref := *previousRef
	if ref == "" {
		if ref, err = git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^"); err != nil {
			return binary, errNoRelease
		}
	}
	if binary.commit, err = git("rev-parse", "--short", "--verify", ref+"^{commit}"); err != nil {
		return binary, fmt.Errorf("%w: %w", errNoHistory, err)
	}
	root, err := git("rev-parse", "--show-toplevel")
	if err != nil {
		return binary, err
	}
	archive, sources := filepath.Join(buildDir, "previous.tar"), filepath.Join(buildDir, "previous")
	if _, err := git("-C", root, "archive", "--format=tar", "--prefix=previous/", "-o", archive,
		binary.commit); err != nil {
		return binary, err
	}
	if out, err := exec.Command("tar", "-xf", archive, "-C", buildDir).CombinedOutput(); err != nil {
		return binary, fmt.Errorf("tar: %w: %s", err, out)
	}
	binary.path = filepath.Join(buildDir, "weir-previous")
	build := exec.Command("go", "build", "-o", binary.path, "./cmd/node")
	build.Dir = sources
	if out, err := build.CombinedOutput(); err != nil {
		return binary, fmt.Errorf("go build of %s: %w\n%s", binary.commit, err, out)
	}
	return binary, nil
})

type previousBinary struct{ commit, path string }

var (
	errNoHistory = errors.New("no such commit to build")
	errNoRelease = errors.New(
		"there is no tag v* before this commit, so nothing was released that an upgrade could begin from: name a commit with -previous")
)

// previous returns the path of the binary of the release before.
func previous(t *testing.T) string {
	t.Helper()
	b, err := previousBuild()
	if errors.Is(err, errNoRelease) {
		t.Skip(err)
	}
	if b.commit == "" {
		t.Skipf("needs git and the history of this repository: %v", err)
	}
	must.NoError(t, err)
	t.Logf("the release before is built from %s", b.commit)
	return b.path
}

// TestUpgradeUnderLoad replaces a cluster of the release before by this build, node by node, and takes all steps back,
// as TestRollingRestart does: under load, with every durability and consistency, judged.
func TestUpgradeUnderLoad(t *testing.T) {
	plainOnly(t)
	survival(t)
	old := previous(t)
	f := newFleet(t, 3, policyFile(), nil)
	for _, m := range f.members {
		m.program = old
	}
	l := f.begin(f.members...)
	l.bite()
	from := l.now()
	for _, program := range []string{binary(t), old} {
		for _, m := range f.members {
			l.leave(m)
			m.program = program
			f.start(m)
			l.with(m)
		}
		t.Logf("calm after %v", f.calm(f.members...).Round(time.Millisecond))
		l.bite()
	}
	l.noneFailed(from)
	l.judge(faults{})
}
