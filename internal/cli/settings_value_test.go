package cli

import (
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
)

// TestOrNone: 0 stands for none, and for nothing else.
func TestOrNone(t *testing.T) {
	count, bound := autoOr(orNone(parseNumber(0))), orNone(parseBound)
	for text, want := range map[string]int{"auto": 0, "0": -1, "7": 7} {
		got, err := count(text)
		expect.True(t, got == want && err == nil, "%q: %d, %v, want %d", text, got, err, want)
	}
	for text, want := range map[string]time.Duration{"0": -1, "0s": -1, "1m": time.Minute} {
		got, err := bound(text)
		expect.True(t, got == want && err == nil, "%q: %v, %v, want %v", text, got, err, want)
	}
	for _, text := range []string{"-1", "", "x", "2147483648"} {
		n, err := count(text)
		expect.True(t, err != nil, "%q is %d", text, n)
	}
	for _, text := range []string{"-1ns", "", "5"} {
		d, err := bound(text)
		expect.True(t, err != nil, "%q is %v", text, d)
	}
	d, err := parseWait("0s")
	expect.True(t, err != nil, "a wait of 0 is %v", d)
}
