package clustertest

import (
	"flag"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/must"
)

var previousRef = flag.String("previous", "",
	"the `commit` or tag that an upgrade begins from: by default the newest tag v* before this commit")

// previous builds the binary of the release before, from this repository's history, and returns its path.
func previous(t *testing.T) string {
	t.Helper()
	run := func(dir, name string, args ...string) (string, error) {
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, out)
		}
		return strings.TrimSpace(string(out)), err
	}
	ref := *previousRef
	if ref == "" {
		tag, err := run("", "git", "describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
		if err != nil {
			t.Skipf("no tag v* before this commit to begin an upgrade from: name a commit with -previous: %v", err)
		}
		ref = tag
	}
	commit := must.Value(run("", "git", "rev-parse", "--short", "--verify", ref+"^{commit}"))(t)
	root, dir := must.Value(run("", "git", "rev-parse", "--show-toplevel"))(t), t.TempDir()
	archive, program := filepath.Join(dir, "previous.tar"), filepath.Join(dir, "weir-previous")
	must.Value(run(root, "git", "archive", "--format=tar", "--prefix=previous/", "-o", archive, commit))(t)
	must.Value(run(dir, "tar", "-xf", archive))(t)
	must.Value(run(filepath.Join(dir, "previous"), "go", "build", "-o", program, "./cmd/node"))(t)
	t.Logf("the release before is built from %s", commit)
	return program
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
