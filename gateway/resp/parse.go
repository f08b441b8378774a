package resp

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// bounds bound one command of a caller.
type bounds struct {
	args int  // number of arguments, with the name
	size int  // in bytes, as sent
	open bool // the caller is not authenticated
}

// The bounds before and after authentication. An unauthenticated caller may send as many arguments as Redis allows. The
// longest useful commands are a check with a key of 1 KiB, and COMMAND INFO with a list of names.
var (
	openBounds  = bounds{args: 10, size: 16 << 10, open: true}
	knownBounds = bounds{args: 1024, size: 64 << 10}
)

// maxLine bounds a line that announces a length: '*' or '$' and a number.
const maxLine = 32

// protocolError is malformed input. It ends the connection, since the beginning of the next command cannot be found.
type protocolError string

func (e protocolError) Error() string { return "Protocol error: " + string(e) }

// span is the place of an argument in the parsed bytes.
type span struct{ from, to int }

// command is the place of a command's arguments in burst.args.
type command struct{ first, n int }

// burst is the complete commands at the beginning of some bytes: arrays of bulk strings, or lines (inline commands).
type burst struct {
	cmds []command
	args []span
}

// parse replaces the burst by at most most complete commands at the beginning of b. It returns the length of these
// commands; behind them comes an incomplete command, or another one for the next call. It skips empty arrays and blank
// lines, as Redis does. It removes the quotes of inline arguments within b. After an error the burst has the commands
// before the malformed one.
//
// A command that arrives in pieces is parsed again with each piece. The work of that is bounded by the arguments before
// the missing piece, at most bounds.args.
func (p *burst) parse(b []byte, max bounds, most int) (used int, err error) {
	p.cmds, p.args = p.cmds[:0], p.args[:0]
	for used < len(b) && len(p.cmds) < most {
		first := len(p.args)
		var n int
		if b[used] == '*' {
			n, err = p.array(b[used:], used, max)
		} else {
			n, err = p.line(b[used:], used, max)
		}
		if err != nil || n == 0 {
			p.args = p.args[:first]
			if err == nil && len(b)-used >= max.size {
				err = tooLong(max)
			}
			return used, err
		}
		if len(p.args) > first {
			p.cmds = append(p.cmds, command{first, len(p.args) - first})
		}
		used += n
	}
	return used, nil
}

func tooLong(max bounds) error {
	return protocolError(fmt.Sprintf("the command is longer than %d bytes", max.size))
}

// array parses the array of bulk strings at the beginning of b; at is the place of b in the parsed bytes. It returns
// the length of the array, or 0 when b does not hold all of it.
func (p *burst) array(b []byte, at int, max bounds) (int, error) {
	count, i, err := length(b, "multibulk")
	if err != nil || i == 0 {
		return 0, err
	}
	if count > int64(max.args) {
		return 0, beyond(max, "multibulk", count)
	}
	for range count {
		if i == len(b) {
			return 0, nil
		}
		if b[i] != '$' {
			return 0, protocolError(fmt.Sprintf("expected '$', got %s", quoted(b[i])))
		}
		n, head, err := length(b[i:], "bulk")
		if err != nil || head == 0 {
			return 0, err
		}
		if n < 0 {
			return 0, protocolError("invalid bulk length")
		}
		if n > int64(max.size) {
			return 0, beyond(max, "bulk", n)
		}
		from := i + head
		i = from + int(n) + len("\r\n")
		if i > max.size {
			return 0, tooLong(max)
		}
		if i > len(b) {
			return 0, nil
		}
		if b[i-2] != '\r' || b[i-1] != '\n' {
			return 0, protocolError("invalid bulk length")
		}
		p.args = append(p.args, span{at + from, at + i - 2})
	}
	return i, nil
}

// redisMost bounds the elements of a command in Redis, and in beyond the lengths to which Redis' error for strangers
// applies.
const redisMost = 1 << 20

// beyond returns Redis' error for a length beyond the bounds.
func beyond(max bounds, what string, n int64) error {
	if max.open && n <= redisMost {
		return protocolError("unauthenticated " + what + " length")
	}
	return protocolError("invalid " + what + " length")
}

// quoted returns a byte in printable form, for the text of an error.
func quoted(c byte) string {
	if c >= ' ' && c <= '~' {
		return "'" + string(rune(c)) + "'"
	}
	return fmt.Sprintf("'\\x%02x'", c)
}

// length parses the line at the beginning of b that announces a number of elements or bytes. used is the length of the
// line, or 0 when its end is missing.
func length(b []byte, what string) (n int64, used int, err error) {
	// The common case: one or two digits.
	if len(b) >= 5 && isDigit(b[1]) {
		switch {
		case b[2] == '\r' && b[3] == '\n':
			return int64(b[1] - '0'), 4, nil
		case isDigit(b[2]) && b[3] == '\r' && b[4] == '\n':
			return 10*int64(b[1]-'0') + int64(b[2]-'0'), 5, nil
		}
	}
	end := bytes.IndexByte(b[:min(len(b), maxLine)], '\n')
	switch {
	case end < 0 && len(b) >= maxLine:
		return 0, 0, protocolError("too big " + what + " count string")
	case end < 0:
		return 0, 0, nil
	}
	digits, whole := bytes.CutSuffix(b[1:end], []byte("\r"))
	n, err = strconv.ParseInt(string(digits), 10, 64)
	if !whole || err != nil || digits[0] == '+' {
		return 0, 0, protocolError("invalid " + what + " length")
	}
	return n, end + 1, nil
}

// line parses the inline command at the beginning of b, as people and load balancers type them: words, separated by
// spaces, with quotes as in a shell; at is the place of b in the parsed bytes. It returns the length of the line, or 0
// when its end is missing.
func (p *burst) line(b []byte, at int, max bounds) (int, error) {
	end := bytes.IndexByte(b[:min(len(b), max.size)], '\n')
	switch {
	case end < 0 && len(b) >= max.size:
		return 0, protocolError("too big inline request")
	case end < 0:
		return 0, nil
	}
	words := bytes.TrimSuffix(b[:end], []byte("\r"))
	first := len(p.args)
	for i := 0; ; {
		for i < len(words) && isSpace(words[i]) {
			i++
		}
		if i == len(words) {
			return end + 1, nil
		}
		if len(p.args)-first == max.args {
			return 0, beyond(max, "multibulk", int64(max.args))
		}
		from, to, ok := i, i, true
		if i, to, ok = unquote(words, i); !ok {
			return 0, protocolError("unbalanced quotes in request")
		}
		p.args = append(p.args, span{at + from, at + to})
	}
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

func isSpace(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }

// unquote removes the quotes of the word at from, in place. next is where the rest of the line begins, to where the
// word now ends. ok is false when a quote is not closed or the closing one is not followed by a space. Within double
// quotes \n, \r, \t, \b, \a and \xHH mean what they mean in C, and a backslash before another character is dropped.
// Within single quotes only \' has a meaning.
func unquote(line []byte, from int) (next, to int, ok bool) {
	to = from
	quote := byte(0)
	for i := from; i < len(line); i++ {
		c := line[i]
		switch {
		case quote == 0 && isSpace(c):
			return i, to, true
		case quote == 0 && (c == '"' || c == '\''):
			quote = c
			continue
		case quote != 0 && c == quote:
			// The closing quote ends the word.
			return i + 1, to, i+1 == len(line) || isSpace(line[i+1])
		case quote == '"' && c == '\\' && i+1 < len(line):
			i++
			c = line[i]
			if at := strings.IndexByte("nrtba", c); at >= 0 {
				c = "\n\r\t\b\a"[at]
			} else if c == 'x' && i+2 < len(line) {
				if v, err := strconv.ParseUint(string(line[i+1:i+3]), 16, 8); err == nil {
					c = byte(v)
					i += 2
				}
			}
		case quote == '\'' && c == '\\' && i+1 < len(line) && line[i+1] == '\'':
			i++
			c = '\''
		}
		line[to] = c
		to++
	}
	return len(line), to, quote == 0
}
