package cluster

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

func TestGossipLog(t *testing.T) {
	var out bytes.Buffer
	unreadable := 0
	g := newGossipLog(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})), func() { unreadable++ })
	l := g.standard()
	for _, test := range []struct{ line, want string }{
		{"[DEBUG] memberlist: Stream connection from=1", `level=DEBUG msg="gossip: Stream connection from=1"`},
		{"[INFO] memberlist: Suspect b has failed, no acks received", "level=DEBUG"},
		{"[WARN] memberlist: Refuting a suspect message (from: b/1)", `level=WARN msg="gossip: Refuting a suspect message (from: b/1)"`},
		{"[WARN] memberlist: Refuting a suspect message (from: c/1)", "level=DEBUG"},
		{"[ERR] memberlist: Decrypt packet failed: x from=1.2.3.4", "level=WARN"},
		{"[ERR] memberlist: Failed to send UDP ping: write udp", "level=DEBUG"},
		{"[WARN] memberlist: ignoring alive message for 'b': refused", "level=DEBUG"},
		{"no level", `msg="gossip: no level"`},
	} {
		out.Reset()
		l.Print(test.line)
		if !strings.Contains(out.String(), test.want) {
			t.Errorf("%s\nis logged as %swant %s", test.line, out.String(), test.want)
		}
	}
	if unreadable != 1 {
		t.Errorf("%d lines are about what cannot be decrypted, want 1", unreadable)
	}
	g.forget()
	out.Reset()
	l.Print("[WARN] memberlist: Refuting a suspect message (from: c/1)")
	if !strings.Contains(out.String(), "level=WARN") {
		t.Errorf("after a while: %s", out.String())
	}
}
