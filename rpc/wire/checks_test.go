package wire

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestLists: a list is as short as will do, and has every value.
func TestLists(t *testing.T) {
	for _, c := range []struct{ values, list []int }{
		{nil, nil}, {[]int{1}, nil}, {[]int{1, 1, 1}, nil}, {[]int{2}, []int{2}}, {[]int{2, 2}, []int{2}}, {[]int{0, 0}, []int{0}},
		{[]int{1, 2}, []int{1, 2}}, {[]int{2, 2, 1}, []int{2, 2, 1}}, {[]int{1, 1, 2, 1}, []int{1, 1, 2, 1}}, {[]int{2, 1, 1}, []int{2, 1, 1}},
	} {
		list := []int{7, 7, 7}[:0] // of a message before
		for i, v := range c.values {
			Add(&list, i, len(c.values), v, 1)
		}
		expect.True(t, slices.Equal(list, c.list) && Fits(list, len(c.values)), "%v: %v, want %v", c.values, list,
			c.list)
		for i, v := range c.values {
			got := At(list, i, 1)
			expect.True(t, got == v, "%v: element %d of %v is %d", c.values, i, list, got)
		}
	}
	expect.True(t, !Fits([]int{1, 2}, 3), "two elements do not fit three checks")
}

// TestChecksAndDecisions: what is added is read.
func TestChecksAndDecisions(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	some := func() int64 { return []int64{0, 1, -1, rng.Int64()}[rng.IntN(4)] }
	targets := Targets{{Policy: "p"}, {Policy: "q"}}
	for n := range 40 {
		in, out := new(weirv1.CheckStreamRequest), new(weirv1.CheckStreamResponse)
		checks, decisions := make([]limit.Check, n), make([]limit.Decision, n)
		one := rng.IntN(2) == 0 // all are alike
		for i := range checks {
			number := rng.IntN(2)
			checks[i] = limit.Check{Target: targets[number], Cost: some(), Partial: rng.IntN(2) == 0, RequestID: []string{"", "r"}[rng.IntN(2)]}
			d := &decisions[i]
			for _, f := range numbers(d, new(int64), out) {
				*f.field = some()
			}
			for _, f := range truths(d) {
				*f = rng.IntN(2) == 0
			}
			d.RetryAfter = []time.Duration{0, 5, algo.Never}[rng.IntN(3)]
			if one && i > 0 {
				checks[i], decisions[i], number = checks[0], decisions[0], slices.Index([]string{"p", "q"}, checks[0].Policy)
			}
			checks[i].Key = "k" + string(rune('a'+i))
			AddCheck(in, i, n, uint32(number), &checks[i])
			AddDecision(out, i, n, uint32(i), d)
		}
		expect.True(t, (!one || n <= 0 || len(in.Costs)+len(in.Targets)+len(in.Partial)+len(in.RequestIds) <= 4) &&
			(!one || len(out.Limit) <= 1), "lists are too long: %v, %v", in, out)
		got := make([]limit.Check, n)
		err := ReadChecks(in, targets.At, func(i int) *limit.Check { return &got[i] })
		must.True(t, err == nil && DecisionsFit(out, n), "%v %v", err, out)
		back := make([]limit.Decision, n)
		for i := range back {
			ReadDecision(out, i, &back[i])
		}
		diff := cmp.Diff(checks, got) + cmp.Diff(decisions, back)
		must.True(t, diff == "", "%v", diff)
	}
}
