package cluster

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

func TestGossipLog(t *testing.T) {
	var out bytes.Buffer
	unreadable := 0
	g := newGossipLog(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})),
		func() { unreadable++ })
	l := g.standard()
	for _, test := range []struct{ line, want string }{
		{"[DEBUG] memberlist: Stream connection from=1", `level=DEBUG msg="gossip: Stream connection from=1"`},
		{"[INFO] memberlist: Suspect b has failed, no acks received", "level=DEBUG"},
		{"[WARN] memberlist: Refuting a suspect message (from: b/1)",
			`level=WARN msg="gossip: Refuting a suspect message (from: b/1)"`},
		{"[WARN] memberlist: Refuting a suspect message (from: c/1)", "level=DEBUG"},
		{"[ERR] memberlist: Decrypt packet failed: x from=1.2.3.4", "level=WARN"},
		{"[ERR] memberlist: Failed to send UDP ping: write udp", "level=DEBUG"},
		{"[WARN] memberlist: ignoring alive message for 'b': refused", "level=DEBUG"},
		{"no level", `msg="gossip: no level"`},
	} {
		out.Reset()
		l.Print(test.line)
		expect.True(t, strings.Contains(out.String(), test.want),
			"%s\nis logged as %swant %s", test.line, out.String(), test.want)
	}
	expect.Equal(t, unreadable, 1, "lines are about what cannot be decrypted")
	g.forget()
	out.Reset()
	l.Print("[WARN] memberlist: Refuting a suspect message (from: c/1)")
	expect.True(t, strings.Contains(out.String(), "level=WARN"), "after a while: %s", out.String())
}
