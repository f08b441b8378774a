package fairshare

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/weirlimit/weir/test/expect"
)

// TestNobodyTakesAll: whoever takes whatever they get, in whatever pieces, leaves a quarter for those who come later;
// several leave some; and all that is given back is there again.
func TestNobodyTakesAll(t *testing.T) {
	const most = 1000
	for greedy := 1; greedy <= 9; greedy++ {
		for _, piece := range []int{1, 7, 300, 5000} {
			p := New(most)
			var held []Taken
			for got := true; got; {
				got = false
				for i := range greedy {
					if t := p.Take(fmt.Sprint(i), piece); t.N > 0 {
						held, got = append(held, t), true
					}
				}
			}
			taken, _ := p.InUse()
			left := most - taken
			expect.True(t, left != 0 && (greedy != 1 || left >= most/4) &&
				(piece != 1 || left >= most/2/int64(greedy+1)), "%d who take %d at a time leave %d", greedy, piece,
				left)
			if late := p.Take("late", 1); late.N != 1 {
				t.Errorf("%d who take %d at a time leave nothing", greedy, piece)
			} else {
				held = append(held, late)
			}
			for _, h := range held {
				p.Give(h)
			}
			if taken, _ := p.InUse(); taken != 0 || len(p.of) != 0 {
				t.Errorf("%d are taken, and %v counted, after all are back", taken, p.of)
			}
		}
	}
}

// TestOneCallerHasHalf: who is alone has all until half of the places are taken, and a name is needed to be held to a
// share.
func TestOneCallerHasHalf(t *testing.T) {
	p := New(10)
	got := p.Take("a", 5)
	expect.True(t, got.N == 5 && !got.counted, "%+v of the first half", got)
	got = p.Take("", 9)
	expect.Equal(t, got.N, 5, "nobody got %+v of the other half", got)
	got = p.Take("b", 1)
	expect.Equal(t, got.N, 0, "%+v where there is nothing", got)
	got = New(0).Take("a", 1<<30)
	expect.Equal(t, got.N, 1<<30, "%+v of any number", got)
}

// TestConcurrentUse: never more than there are, whoever asks at the same time.
func TestConcurrentUse(t *testing.T) {
	const most = 100
	p := New(most)
	var held sync.WaitGroup
	for i := range 8 {
		held.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			var mine []Taken
			total := 0
			for range 2000 {
				if random.IntN(3) == 0 && len(mine) > 0 {
					total -= mine[0].N
					p.Give(mine[0])
					mine = mine[1:]
					continue
				}
				got := p.Take(fmt.Sprint(i%3), 1+random.IntN(9))
				mine, total = append(mine, got), total+got.N
				expect.True(t, total <= most, "%d of %d", total, most)
			}
			for _, h := range mine {
				p.Give(h)
			}
		})
	}
	held.Wait()
	taken, _ := p.InUse()
	expect.True(t, taken == 0 && len(p.of) == 0, "%d are taken, and %v counted, after all are back", taken, p.of)
}
