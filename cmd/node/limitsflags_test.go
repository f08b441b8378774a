package main

import (
	"io"
	"strings"
	"testing"

	"github.com/weirlimit/weir/internal/node"
)

// TestLimitsFlags: flags that are not given leave the bounds to the node, and what makes no sense is an error that names the flag.
func TestLimitsFlags(t *testing.T) {
	var f limitsFlags
	cmd := newRun()
	f.register(newStatus().Flags())
	want := node.Limits{MaxAge: node.DefaultMaxAge, IdleTimeout: node.DefaultIdleTimeout, MaxHeader: node.DefaultMaxHeader,
		FirstMessage: node.DefaultFirstMessage, WriteTimeout: node.DefaultWriteTimeout}
	if got, err := f.config(); err != nil || got != want {
		t.Errorf("flags say %+v, %v", got, err)
	}
	for _, c := range []struct{ args, want string }{
		{"--max-connections -1", "max-connections"},
		{"--max-connections-per-source -1", "--max-connections-per-source: "},
		{"--max-anonymous-connections 0", "max-anonymous-connections"},
		{"--max-connection-age 1ms", "--max-connection-age: "},
		{"--idle-timeout -1s", "--idle-timeout: "},
		{"--max-streams 0", "max-streams"},
		{"--max-message-size 1GB2", "max-message-size"},
		{"--max-message-size 10B", "max-message-size"},
		{"--max-header-size 1GiB", "max-header-size"},
		{"--write-timeout 1ms", "--write-timeout: "},
		{"--first-message-timeout 0", "--first-message-timeout: "},
		{"--max-in-flight -1", "max-in-flight"},
	} {
		var out strings.Builder
		if code := run(append([]string{"run"}, strings.Fields(c.args)...), io.Discard, &out); code != exitError || !strings.Contains(out.String(), c.want) {
			t.Errorf("%s: %d %s", c.args, code, &out)
		}
	}
	if cmd.Flags().Lookup("max-connections") == nil {
		t.Error("run has no --max-connections")
	}
}
