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
		{"[WARN] memberlist: Refuting a suspect message (from: b/1)",
			`level=DEBUG msg="gossip: Refuting a suspect message (from: b/1)"`},
		{"[ERR] memberlist: Decrypt packet failed: x from=1.2.3.4", "level=DEBUG"},
		{"[WARN] memberlist: Was able to connect to b/1 over TCP but UDP probes failed, network may be misconfigured",
			"level=WARN"},
		{"[WARN] memberlist: Was able to connect to c/1 over TCP but UDP probes failed, network may be misconfigured",
			"level=DEBUG"},
		{"no level", `msg="gossip: no level"`},
	} {
		out.Reset()
		l.Print(test.line)
		expect.True(t, strings.Contains(out.String(), test.want),
			"%s\nis logged as %swant %s", test.line, out.String(), test.want)
	}
	expect.Equal(t, unreadable, 1, "lines are about what cannot be decrypted")
}
