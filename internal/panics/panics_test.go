package panics

import (
	"errors"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

func TestCall(t *testing.T) {
	plain := errors.New("plain")
	expect.Equal(t, Call(func() error { return plain }), plain, "an error")
	expect.NoError(t, Call(func() error { return nil }), "no error")
	var p *Error
	err := Call(func() error {
		var none []int
		_ = none[len(none)]
		return nil
	})
	expect.True(t, errors.As(err, &p) && strings.Contains(p.Error(), "out of range") &&
		strings.Contains(string(p.Stack), "panics_test.go"), "a panic: %v", err)
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
	err := Call(func() error { g.Wait(); return nil })
	expect.True(t, errors.As(err, &p) && strings.Contains(p.Error(), "out of range") &&
		strings.Contains(string(p.Stack), "TestGroup"), "a function panicked: %v", err)
	for i, done := range done {
		expect.True(t, done, "function %d did not run", i)
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
	expect.True(t, ran == 2 && told == nil, "%d of 2 functions ran, %v is told", ran, told)
	Tell(tell, func() { panic("mistake") })
	expect.True(t, len(told) == 1 && told[0].Value == "mistake" && strings.Contains(string(told[0].Stack), "TestTell"),
		"a panic: %v is told", told)
	err := Call(func() error { Tell(nil, func() { panic("untold") }); return nil })
	expect.True(t, err != nil, "a panic that nobody is told of is recovered")
}
