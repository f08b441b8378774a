package resp

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// Versions of the protocol. A connection uses RESP2 until HELLO asks for RESP3, which adds maps, sets, booleans and
// nulls.
const (
	resp2 = 2
	resp3 = 3
)

func appendInt(b []byte, n int64) []byte { return number(b, ':', n) }

// appendArray begins an array of n replies.
func appendArray(b []byte, n int) []byte { return number(b, '*', int64(n)) }

func number(b []byte, kind byte, n int64) []byte {
	return append(strconv.AppendInt(append(b, kind), n, 10), '\r', '\n')
}

// appendMap begins a map of n pairs. RESP2 has an array of keys and values in place of it.
func appendMap(b []byte, proto, n int) []byte {
	if proto == resp3 {
		return number(b, '%', int64(n))
	}
	return number(b, '*', 2*int64(n))
}

// appendSet begins a set of n elements. RESP2 has an array in place of it.
func appendSet(b []byte, proto, n int) []byte {
	if proto == resp3 {
		return number(b, '~', int64(n))
	}
	return number(b, '*', int64(n))
}

// appendBool appends a boolean: 0 or 1 under RESP2.
func appendBool(b []byte, proto int, v bool) []byte {
	switch {
	case proto == resp3 && v:
		return append(b, "#t\r\n"...)
	case proto == resp3:
		return append(b, "#f\r\n"...)
	case v:
		return append(b, ":1\r\n"...)
	}
	return append(b, ":0\r\n"...)
}

func appendNull(b []byte, proto int) []byte {
	if proto == resp3 {
		return append(b, "_\r\n"...)
	}
	return append(b, "$-1\r\n"...)
}

func appendBulk(b []byte, s string) []byte {
	b = number(b, '$', int64(len(s)))
	return append(append(b, s...), '\r', '\n')
}

// appendSimple appends a simple string. s must not have line ends.
func appendSimple(b []byte, s string) []byte {
	b = append(b, '+')
	return append(append(b, s...), '\r', '\n')
}

// appendError appends an error. It replaces what is not printable UTF-8 in text, which may repeat the caller's input.
func appendError(b []byte, code, text string) []byte {
	b = append(append(b, '-'), code...)
	b = append(b, ' ')
	for _, r := range text {
		if r < ' ' || r == 0x7f || r == utf8.RuneError {
			r = '?'
		}
		b = utf8.AppendRune(b, r)
	}
	return append(b, '\r', '\n')
}

// shortened returns at most the first most bytes of a text.
func shortened(s string, most int) string {
	if len(s) > most {
		return s[:most]
	}
	return s
}

// argsBeginning returns the first arguments of an unknown command as Redis quotes them in its error, about 128 bytes.
func argsBeginning(args []string) string {
	const most = 128
	var b strings.Builder
	for _, a := range args {
		if b.Len() >= most {
			break
		}
		b.WriteString("'" + shortened(a, most-b.Len()) + "' ")
	}
	return b.String()
}
