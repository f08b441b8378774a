package recovered

import (
	"errors"
	"strings"
	"testing"
)

func TestCall(t *testing.T) {
	plain := errors.New("plain")
	if err := Call(func() error { return plain }); err != plain {
		t.Errorf("an error: %v", err)
	}
	if err := Call(func() error { return nil }); err != nil {
		t.Errorf("no error: %v", err)
	}
	var p *Error
	err := Call(func() error {
		var none []int
		_ = none[len(none)]
		return nil
	})
	if !errors.As(err, &p) || !strings.Contains(p.Error(), "out of range") || !strings.Contains(string(p.Stack), "recovered_test.go") {
		t.Errorf("a panic: %v", err)
	}
}
