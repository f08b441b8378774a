package cli

import (
	"testing"
	"time"
)

// TestOrNone: 0 stands for none, and for nothing else.
func TestOrNone(t *testing.T) {
	count, bound := autoOr(orNone(parseNumber(0))), orNone(parseBound)
	for text, want := range map[string]int{"auto": 0, "0": -1, "7": 7} {
		if got, err := count(text); got != want || err != nil {
			t.Errorf("%q: %d, %v, want %d", text, got, err, want)
		}
	}
	for text, want := range map[string]time.Duration{"0": -1, "0s": -1, "1m": time.Minute} {
		if got, err := bound(text); got != want || err != nil {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"-1", "", "x", "2147483648"} {
		if n, err := count(text); err == nil {
			t.Errorf("%q is %d", text, n)
		}
	}
	for _, text := range []string{"-1ns", "", "5"} {
		if d, err := bound(text); err == nil {
			t.Errorf("%q is %v", text, d)
		}
	}
	if d, err := parseWait("0s"); err == nil {
		t.Errorf("a wait of 0 is %v", d)
	}
}
