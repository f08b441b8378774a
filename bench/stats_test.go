package main

import (
	"context"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"testing"
	"time"
)

func TestHistogramQuantiles(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var h, half histogram
	var all []time.Duration
	for i := range 100_000 {
		d := time.Duration(math.Exp(random.Float64()*22) * 10) // 10 ns to 36 s
		all = append(all, d)
		if i%2 == 0 {
			h.add(d)
		} else {
			half.add(d)
		}
	}
	h.merge(&half)
	slices.Sort(all)
	for _, q := range []float64{0, 0.01, 0.5, 0.99, 0.999, 1} {
		want := float64(all[int(q*float64(len(all)-1))])
		if got := float64(h.quantile(q)); math.Abs(got-want) > want*0.032+1 {
			t.Errorf("quantile %v is %v, not about %v", q, time.Duration(got), time.Duration(want))
		}
	}
}

func TestHistogramBuckets(t *testing.T) {
	for b := range buckets {
		if got := bucketOf(middleOf(b)); got != b {
			t.Fatalf("the middle of bucket %d, %v, lies in bucket %d", b, middleOf(b), got)
		}
	}
	for d, want := range map[time.Duration]int{-1: 0, 0: 0, 1: 1, 63: 63, 64: 64, math.MaxInt64: buckets - 1} {
		if got := bucketOf(d); got != want {
			t.Errorf("%d ns lies in bucket %d, not %d", d, got, want)
		}
	}
	var h histogram
	if got := h.quantile(0.5); got != 0 {
		t.Errorf("the median of nothing is %v", got)
	}
}

func TestSpread(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   spread
	}{
		{[]float64{3}, spread{3, 3, 3, 1, [2]float64{3, 3}}},
		{[]float64{4, 1}, spread{2.5, 1, 4, 2, [2]float64{1, 4}}},
		{[]float64{9, 1, 2}, spread{2, 1, 9, 3, [2]float64{1, 9}}},
		{[]float64{4, 3, 2, 1}, spread{2.5, 1, 4, 4, [2]float64{2, 3}}},
		{[]float64{1, 2, 3, 4, 5, 6, 7, 8, 99}, spread{5, 1, 99, 9, [2]float64{3, 7}}},
	} {
		if got := spreadOf(c.values); got != c.want {
			t.Errorf("spread of %v is %+v, not %+v", c.values, got, c.want)
		}
	}
}

func TestRatiosAreTakenWithinRounds(t *testing.T) {
	// The machine was three times slower in the second round, for both; the third has only one of them.
	a := &series{samples: map[int]sample{0: {rate: 300}, 1: {rate: 100}, 2: {rate: 1}}}
	b := &series{samples: map[int]sample{0: {rate: 150}, 1: {rate: 50}, 3: {rate: 7}}}
	got, ok := a.ratioTo(b, rate, rate)
	if want := (spread{2, 2, 2, 2, [2]float64{2, 2}}); !ok || got != want {
		t.Errorf("got %+v, %v; want %+v", got, ok, want)
	}
	if _, ok := a.ratioTo(b, p50, p50); ok {
		t.Error("a ratio of figures that were not taken")
	}
	if _, ok := a.ratioTo(&series{samples: map[int]sample{0: {rate: 0}}}, rate, rate); ok {
		t.Error("a ratio to nothing")
	}
}

func TestJudge(t *testing.T) {
	all := []*series{
		{work: "w", system: "subject", samples: map[int]sample{0: {rate: 90, failed: 0.5}, 1: {rate: 110}}},
		{work: "w", system: "base", samples: map[int]sample{0: {rate: 100}, 1: {rate: 100}}},
	}
	for _, c := range []struct {
		t    target
		want string
	}{
		{target{"", "w/subject", "w/base", rate, 1, true}, "pass"},
		{target{"", "w/subject", "w/base", rate, 1.01, true}, "short"},
		{target{"", "w/subject", "w/base", rate, 1, false}, "pass"},
		{target{"", "w/subject", "w/base", rate, 0.99, false}, "short"},
		{target{"", "w/subject", "", failed, 0, false}, "short"},
		{target{"", "w/subject", "", failed, 0.5, false}, "pass"},
		{target{"", "w/subject", "w/absent", rate, 1, true}, "not measured"},
		{target{"", "w/absent", "w/base", rate, 1, true}, "not measured"},
		{target{"", "w/subject", "w/base", p50, 1, true}, "not measured"},
	} {
		if got := judge(all, []target{c.t})[0]; got.Result != c.want {
			t.Errorf("%+v: %+v, want %s", c.t, got, c.want)
		}
	}
}

func TestRoundsTakeTurns(t *testing.T) {
	var ran []string
	m := func(work, system string, once bool, err error) measurement {
		return measurement{work: work, system: system, once: once, run: func(context.Context) (sample, error) {
			ran = append(ran, work+"/"+system)
			return sample{rate: float64(len(ran))}, err
		}}
	}
	all := []measurement{
		m("a", "x", false, nil), m("a", "y", false, nil), m("b", "once", true, nil),
		m("b", "broken", false, errors.New("no")), m("c", "unwanted", false, nil),
	}
	got, err := runRounds(context.Background(), io.Discard, all, 2, regexp.MustCompile("^[ab]/"))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"a/x", "a/y", "b/once", "b/broken", "a/y", "a/x"}
	if !reflect.DeepEqual(ran, want) {
		t.Errorf("ran %v, want %v", ran, want)
	}
	if len(got) != 4 || len(got[0].samples) != 2 || got[3].err == nil {
		t.Errorf("series %+v", got)
	}
	if s, ok := got[0].of(rate); !ok || s != (spread{3.5, 1, 6, 2, [2]float64{1, 6}}) {
		t.Errorf("spread %+v, %v", s, ok)
	}

	ran = nil
	all = []measurement{m("d", "x", false, nil), m("d", "y", false, nil)}
	for i := range all {
		all[i].turns = 3
	}
	if got, err = runRounds(context.Background(), io.Discard, all, 2, regexp.MustCompile("")); err != nil {
		t.Fatal(err)
	}
	want = []string{"d/x", "d/y", "d/y", "d/x", "d/x", "d/y", "d/y", "d/x", "d/x", "d/y", "d/y", "d/x"}
	if !reflect.DeepEqual(ran, want) || len(got[0].samples) != 6 || got[0].samples[1][rate] != 4 || got[1].samples[5][rate] != 11 {
		t.Errorf("ran %v: %+v", ran, got)
	}

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := runRounds(ctx, io.Discard, all, 2, regexp.MustCompile("")); !errors.Is(err, context.Canceled) {
		t.Errorf("a run that was interrupted ended with %v", err)
	}
}

func TestDrive(t *testing.T) {
	l := load{callers: 4, warm: time.Millisecond, measure: 50 * time.Millisecond}
	got, err := l.drive(context.Background(), func(i int) caller {
		n := 0
		return loop(func(context.Context) (int, error) {
			if n++; n%4 == 0 {
				return 0, errors.New("every fourth")
			}
			time.Sleep(time.Millisecond)
			return 10, nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if got[failed] < 0.1 || got[failed] > 0.4 || got[rate] <= 0 || got[rate] > 40_000 || got[p999] < got[p50] {
		t.Errorf("%v", got)
	}
	if _, ok := got[serverCPU]; ok {
		t.Error("CPU of servers that there are none of")
	}
	_, err = l.drive(context.Background(), func(int) caller {
		return loop(func(context.Context) (int, error) { return 0, io.ErrUnexpectedEOF })
	})
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a load without a single decision gave %v", err)
	}
}
