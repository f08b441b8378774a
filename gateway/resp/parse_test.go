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

// words are the commands of a burst that was parsed out of b, for comparisons.
func words(p *burst, b []byte) [][]string {
	var all [][]string
	for _, cmd := range p.cmds {
		var args []string
		for _, a := range p.args[cmd.first : cmd.first+cmd.n] {
			args = append(args, string(b[a.from:a.to]))
		}
		all = append(all, args)
	}
	return all
}

// TestParse: what is a command, and what is an error; in Redis' words where it has some.
func TestParse(t *testing.T) {
	long := strings.Repeat("x", knownBounds.size)
	for _, c := range []struct {
		in   string
		max  bounds
		want string // the commands as %q has them
		rest int    // bytes left
		err  string
	}{
		{"", knownBounds, `[]`, 0, ""},
		{"*1\r\n$4\r\nPING\r\n", knownBounds, `[["PING"]]`, 0, ""},
		{"*2\r\n$4\r\nECHO\r\n$0\r\n\r\nPING\r\n*1\r\n$1\r\na", knownBounds, `[["ECHO" ""] ["PING"]]`, 9, ""},
		// the bytes of a bulk string mean nothing
		{"*1\r\n$6\r\n\r\n*1\r\n\r\n", knownBounds, `[["\r\n*1\r\n"]]`, 0, ""},
		{"*0\r\n*-1\r\n\r\n\n  \r\nPING\n", knownBounds, `[["PING"]]`, 0, ""},
		{"*\r\n", knownBounds, `[]`, 3, "Protocol error: invalid multibulk length"},
		{"*1\n", knownBounds, `[]`, 3, "Protocol error: invalid multibulk length"},
		{"*1x\r\n", knownBounds, `[]`, 5, "Protocol error: invalid multibulk length"},
		{"*--1\r\n", knownBounds, `[]`, 6, "Protocol error: invalid multibulk length"},
		{"*1025\r\n", knownBounds, `[]`, 7, "Protocol error: invalid multibulk length"},
		{"*9223372036854775807\r\n", knownBounds, `[]`, 22, "Protocol error: invalid multibulk length"},
		{"*11\r\n", openBounds, `[]`, 5, "Protocol error: unauthenticated multibulk length"},
		{"*1\r\n$16385\r\n", openBounds, `[]`, 12, "Protocol error: unauthenticated bulk length"},
		{"*1\r\n$9223372036854775807\r\n", knownBounds, `[]`, 26, "Protocol error: invalid bulk length"},
		{"*1\r\n$-7\r\n", knownBounds, `[]`, 9, "Protocol error: invalid bulk length"},
		{"*1\r\n$-1\r\n", knownBounds, `[]`, 9, "Protocol error: invalid bulk length"},
		{"*1\r\n$1\r\nab\r\n", knownBounds, `[]`, 12, "Protocol error: invalid bulk length"},
		{"*2\r\n$40000\r\n" + long[:40000] + "\r\n$40000\r\n", knownBounds, `[]`, 40022,
			"Protocol error: the command is longer than 65536 bytes"},
		{"*1\r\n*1\r\n$4\r\nPING\r\n", knownBounds, `[]`, 18, "Protocol error: expected '$', got '*'"},
		{"*1\r\n\x01", knownBounds, `[]`, 5, `Protocol error: expected '$', got '\x01'`},
		{"*" + strings.Repeat("0", maxLine), knownBounds, `[]`, maxLine + 1,
			"Protocol error: too big multibulk count string"},
		{"*1\r\n$" + strings.Repeat("0", maxLine), knownBounds, `[]`, maxLine + 5,
			"Protocol error: too big bulk count string"},
		{long, knownBounds, `[]`, len(long), "Protocol error: too big inline request"},
		{"PING\r\n" + long[:openBounds.size], openBounds, `[["PING"]]`, openBounds.size,
			"Protocol error: too big inline request"},
		{"a  b\tc \r\n", knownBounds, `[["a" "b" "c"]]`, 0, ""},
		{`a "b c" 'd "e' "\x41\n\"\\\q" '\'\n' ""` + "\n", knownBounds, `[["a" "b c" "d \"e" "A\n\"\\q" "'\\n" ""]]`, 0,
			""},
		{"a\"b\"\n", knownBounds, `[["ab"]]`, 0, ""},
		{"a \"b\n", knownBounds, `[]`, 5, "Protocol error: unbalanced quotes in request"},
		{"a 'b'c\n", knownBounds, `[]`, 7, "Protocol error: unbalanced quotes in request"},
		{"a \"b\\\n", knownBounds, `[]`, 6, "Protocol error: unbalanced quotes in request"},
		{strings.Repeat("a ", 11) + "\n", openBounds, `[]`, 23, "Protocol error: unauthenticated multibulk length"},
	} {
		var p burst
		b := []byte(c.in)
		used, err := p.parse(b, c.max, maxRound)
		got := ""
		if err != nil {
			got = err.Error()
		}
		if w := fmt.Sprintf("%q", words(&p, b)); w != c.want || len(b)-used != c.rest || got != c.err {
			t.Errorf("%.60q: %s, %d left, %q", c.in, w, len(b)-used, got)
		}
	}
}

// inPieces parses what comes in pieces of so many bytes, as a connection does, and returns the commands, the most
// arguments held at a time, and the error.
func inPieces(in []byte, bound bounds, size, most int) (all [][]string, args int, err error) {
	var p burst
	var held []byte
	for len(in) > 0 || len(held) > 0 {
		n := min(size, len(in))
		held, in = append(held, in[:n]...), in[n:]
		for {
			used, bad := p.parse(held, bound, most)
			all = append(all, words(&p, held)...)
			args = max(args, cap(p.args))
			held = held[used:]
			if bad != nil {
				return all, args, bad
			}
			if len(p.cmds) < most {
				break
			}
		}
		if len(in) == 0 {
			break
		}
	}
	return all, args, nil
}

// FuzzParse: however what comes is cut into pieces, the same commands come out of it, and no more is held than the
// bounds say.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"*5\r\n$11\r\nCL.THROTTLE\r\n$1\r\nk\r\n$2\r\n15\r\n$2\r\n30\r\n$2\r\n60\r\n", "PING\r\nECHO \"a b\"\r\n",
		"*1\r\n$-7\r\n", "*9223372036854775807\r\n",
		"*1\r\n$9223372036854775807\r\n", "*0\r\n*1\r\n*1\r\n", "*2\r\n$1\r\na\r\n$2\r\nb", "a 'b\\'c' \"\\x4\"\n",
		"$3\r\nfoo\r\n",
	} {
		f.Add([]byte(seed), 3, true)
	}
	f.Fuzz(func(t *testing.T, in []byte, size int, open bool) {
		if len(in) > 2000 {
			return // beyond the bounds nothing is new
		}
		bound := bounds{args: 8, size: 400, open: open}
		size = 1 + int(uint(size)%500)
		whole, _, bad := inPieces(bytes.Clone(in), bound, len(in)+1, maxRound)
		for _, by := range []int{1, size, size + 7} {
			pieces, args, err := inPieces(bytes.Clone(in), bound, by, 1)
			must.True(t, slices.EqualFunc(whole, pieces, slices.Equal) && (bad == nil) == (err == nil) &&
				(bad == nil || bad.Error() == err.Error()),
				"%q in pieces of %d: %q, %v; as a whole: %q, %v", in, by, pieces, err, whole, bad)
			must.True(t, args <= 2*bound.args+8, "%d arguments held", args)
		}
		for _, cmd := range whole {
			must.True(t, len(cmd) != 0 && len(cmd) <= bound.args, "a command of %d arguments", len(cmd))
		}
	})
}

// FuzzConnection: whatever a caller sends, each command has one well-formed reply, and none panics.
func FuzzConnection(f *testing.F) {
	for _, seed := range []string{
		"CL.THROTTLE k 15 30 60\r\nCL.THROTTLE k 15 30 60 -1\r\nCL.THROTTLE \"\" 1 1 1 9223372036854775807\r\n",
		"HELLO 3\r\nWEIR.CHECK login a 3\r\nWEIR.PEEK login a\r\n",
		"*3\r\n$10\r\nWEIR.CHECK\r\n$5\r\nlogin\r\n$1\r\n\xff\r\n*1\r\n$-7\r\n",
		"HELLO 3 SETNAME x\nCOMMAND DOCS\nCOMMAND INFO ping none\nCLIENT INFO\nINFO\nRESET\n",
		"AUTH a\nAUTH default a\nHELLO 2 AUTH default x\nCLIENT SETINFO lib-name x\nSELECT 1\n",
		"ECHO \"a\\r\\n\"\nPING 'b\r\n'\nQUIT\nPING\n", "PING\nPOST / HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		f.Add([]byte(seed))
	}
	address, _, _ := serve(f,
		func(c *Config) { c.Panicked = func(command string, p *panics.Error) { panic(fmt.Sprint(command, p)) } })
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

// replies is how many replies commands have: a command for the protocol's last words, and none after the end of the
// connection.
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
