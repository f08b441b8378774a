package lend

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/expect"
)

// BenchmarkMissed is what a check costs that an owner has admitted, of keys asked all alike by 300,000 checks a second: nothing to lend. The
// keys are as few as the caches hold, for who asks about one has just looked at it.
func BenchmarkMissed(b *testing.B) {
	names := make([]string, 1<<14)
	for i := range names {
		names[i] = fmt.Sprintf("user:%013d", i)
	}
	book := NewBook[string, int](func() {}, nil)
	now, i := int64(1), 0
	clock := func() int64 { return now }
	b.ReportAllocs()
	for b.Loop() {
		now += int64(time.Second / 300_000)
		i++
		book.Missed(names[i%len(names)], 1, clock, strings.Clone)
	}
	expect.True(b, book.Loans() <= 0, "lent what is not asked often")
}

// BenchmarkHotKey is a decision from the loan of a hot key, by one goroutine and by 256.
func BenchmarkHotKey(b *testing.B) {
	book := NewBook[string, int](func() {}, nil)
	began := time.Now()
	clock := func() int64 { return int64(time.Since(began)) }
	for book.Loans() == 0 {
		book.Missed("k", 1, clock, nil)
	}
	reports, _ := book.Report(clock())
	book.Answered(clock(), clock(), []Answer[int]{{Number: reports[0].Number, Lent: limit.Lent{Granted: algo.MaxLimit, Term: time.Hour, Limit: algo.MaxLimit}}})
	take := func(b *testing.B) {
		_, _, ok := book.Take("k", 1, clock)
		expect.True(b, ok, "not lent")
	}
	b.Run("goroutines=1", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			take(b)
		}
	})
	b.Run("goroutines=256", func(b *testing.B) {
		b.SetParallelism(128)
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				take(b)
			}
		})
	})
}
