package panics

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

func TestGroup(t *testing.T) {
	var g Group
	g.SetLimit(2)
	done := make([]bool, 4)
	for i := range done {
		g.Go(func() {
			done[i] = true
			if i == 1 {
				var none []int
				_ = none[i]
			}
		})
	}
	var p *Error
	if err := Call(func() error { g.Wait(); return nil }); !errors.As(err, &p) || !strings.Contains(p.Error(), "out of range") || !strings.Contains(string(p.Stack), "TestGroup") {
		t.Errorf("a function panicked: %v", err)
	}
	for i, done := range done {
		if !done {
			t.Errorf("function %d did not run", i)
		}
	}
	var quiet Group
	quiet.Go(func() {})
	quiet.Wait()
}

func TestTell(t *testing.T) {
	var told []*Error
	tell := func(p *Error) { told = append(told, p) }
	ran := 0
	Tell(tell, func() { ran++ })
	Tell(nil, func() { ran++ })
	if ran != 2 || told != nil {
		t.Errorf("%d of 2 functions ran, %v is told", ran, told)
	}
	Tell(tell, func() { panic("mistake") })
	if len(told) != 1 || told[0].Value != "mistake" || !strings.Contains(string(told[0].Stack), "TestTell") {
		t.Errorf("a panic: %v is told", told)
	}
	if err := Call(func() error { Tell(nil, func() { panic("untold") }); return nil }); err == nil {
		t.Error("a panic that nobody is told of is recovered")
	}
}
