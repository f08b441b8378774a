package resp

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

// bounds are what a caller may send as one command.
type bounds struct {
	args int  // of a command, its name among them
	size int  // bytes of a command as it is sent
	open bool // the caller is not authenticated
}

// The bounds before authentication and after it. The arguments of an unauthenticated caller are bounded as Redis bounds them. The
// longest command that there is a use for is a check with a key of 1 KiB, or COMMAND INFO with a list of names.
var (
	openBounds  = bounds{args: 10, size: 16 << 10, open: true}
	knownBounds = bounds{args: 1024, size: 64 << 10}
)

// maxLine is the longest line that announces a length: '*' or '$' and a number, without its end.
const maxLine = 32

// protocolError is what a caller sent that is no command. The connection ends with it: what comes next cannot be told apart.
type protocolError string

func (e protocolError) Error() string { return "Protocol error: " + string(e) }

// span is the place of an argument.
type span struct{ from, to int }

// command is the place of a command's arguments in burst.args.
type command struct{ first, n int }

// burst is the complete commands at the beginning of what has been read: arrays of bulk strings, or lines (inline commands).
type burst struct {
	cmds []command
	args []span
}

// parse takes up to most commands out of b, in place of those that the burst held, and returns how many bytes they take. What follows
// is the beginning of a command, or one for the next call. An array without elements and a blank line are no commands; Redis ignores
// them, too. b is written to: an inline argument is unquoted where it stands. With an error the commands before the bad one are there.
//
// What is parsed again when a command comes in pieces is bounded by the arguments in front of the missing piece, at most bounds.args.
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

// array parses an array of bulk strings at the beginning of b, whose place is at. It returns its length, 0 when b does not hold all
// of it.
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

// redisMost is how many elements a command may have for Redis, which takes longer bulk strings than that.
const redisMost = 1 << 20

// beyond is the error about a length that is more than may be sent, in Redis' words.
func beyond(max bounds, what string, n int64) error {
	if max.open && n <= redisMost {
		return protocolError("unauthenticated " + what + " length")
	}
	return protocolError("invalid " + what + " length")
}

// quoted is a byte for an error's text, which is a line of printable characters.
func quoted(c byte) string {
	if c >= ' ' && c <= '~' {
		return "'" + string(rune(c)) + "'"
	}
	return fmt.Sprintf("'\\x%02x'", c)
}

// length parses the line at the beginning of b that announces how many elements or bytes follow, and returns with it the length of the
// line; 0 when its end is missing.
func length(b []byte, what string) (n int64, used int, err error) {
	// Nearly all are of one or two digits.
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
	negative := len(digits) > 1 && digits[0] == '-'
	if negative {
		digits = digits[1:]
	}
	if !whole || len(digits) == 0 || len(digits) > 18 { // which fits int64
		return 0, 0, protocolError("invalid " + what + " length")
	}
	for _, c := range digits {
		if !isDigit(c) {
			return 0, 0, protocolError("invalid " + what + " length")
		}
		n = 10*n + int64(c-'0')
	}
	if negative {
		n = -n
	}
	return n, end + 1, nil
}

// line parses an inline command at the beginning of b, whose place is at: words with spaces between them, quoted like in a shell, as
// people and load balancers type them. It returns the length of the line, 0 when its end is missing.
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

// unquote reads the word that begins at from, and leaves it there without its quotes. It returns where the rest of the line begins, and
// where the word now ends; ok is false when a quote is not closed, or something follows a closing one. Within double quotes \n, \r, \t,
// \b, \a and \xHH are what they are in C, and a backslash before anything else is left out; within single quotes only \' is special.
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
