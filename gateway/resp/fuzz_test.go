package resp

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/weirlimit/weir/internal/panics"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// FuzzConnection: whatever a caller sends, each command has one well-formed reply, and none panics.
func FuzzConnection(f *testing.F) {
	for _, seed := range []string{
		"CL.THROTTLE k 15 30 60\r\nCL.THROTTLE k 15 30 60 -1\r\nCL.THROTTLE \"\" 1 1 1 9223372036854775807\r\n", "HELLO 3\r\nWEIR.CHECK login a 3\r\nWEIR.PEEK login a\r\n",
		"*3\r\n$10\r\nWEIR.CHECK\r\n$5\r\nlogin\r\n$1\r\n\xff\r\n*1\r\n$-7\r\n", "HELLO 3 SETNAME x\nCOMMAND DOCS\nCOMMAND INFO ping none\nCLIENT INFO\nINFO\nRESET\n",
		"AUTH a\nAUTH default a\nHELLO 2 AUTH default x\nCLIENT SETINFO lib-name x\nSELECT 1\n", "ECHO \"a\\r\\n\"\nPING 'b\r\n'\nQUIT\nPING\n", "PING\nPOST / HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	address, _, _ := serve(f, func(c *Config) { c.Panicked = func(command string, p *panics.Error) { panic(fmt.Sprint(command, p)) } })
	f.Fuzz(func(t *testing.T, sent []byte) {
		if len(sent) > 4<<10 {
			return
		}
		conn := must.Value(net.Dial("tcp", address))(t)
		defer conn.Close()
		must.Value(conn.Write(sent))(t)
		must.NoError(t, conn.(*net.TCPConn).CloseWrite())
		in := bufio.NewReader(conn)
		got := 0
		for ; ; got++ {
			if _, err := in.Peek(1); err == io.EOF {
				break
			}
			reply(t, in)
		}
		expect.Equal(t, got, replies(bytes.Clone(sent)), "replies to %q", sent)
	})
}

// replies is how many replies commands have: a command for the protocol's last words, and none after the end of the connection.
func replies(sent []byte) int {
	commands, _, bad := inPieces(sent, knownBounds, len(sent)+1, maxRound)
	ends := slices.IndexFunc(commands, func(c []string) bool {
		name := strings.ToLower(c[0])
		return name == "quit" || name == "post" || name == "host:"
	})
	switch {
	case ends >= 0 && strings.EqualFold(commands[ends][0], "quit"):
		return ends + 1
	case ends >= 0:
		return ends
	case bad != nil:
		return len(commands) + 1
	}
	return len(commands)
}

// reply reads one reply of RESP2 or RESP3.
func reply(t *testing.T, in *bufio.Reader) {
	t.Helper()
	line := must.Value(in.ReadString('\n'))(t)
	must.True(t, len(line) > 2 && strings.HasSuffix(line, "\r\n") && strings.Count(line, "\r") == 1, "a line %q", line)
	kind, rest := line[0], line[1:len(line)-2]
	if strings.IndexByte("+-#_", kind) >= 0 {
		return
	}
	n := must.Value(strconv.ParseInt(rest, 10, 64))(t)
	switch kind {
	case ':':
	case '$':
		if n >= 0 {
			text := make([]byte, n+2)
			must.Value(io.ReadFull(in, text))(t)
			must.True(t, bytes.HasSuffix(text, []byte("\r\n")), "a text %q", text)
		}
	case '%', '*', '~':
		if kind == '%' {
			n *= 2
		}
		for range n {
			reply(t, in)
		}
	default:
		t.Fatalf("a reply %q", line)
	}
}
