package clustertest

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/testkit"
)

// countedLimit is the limit of the keys that overRestarts counts: far more than it uses, of which none comes back while it does.
const countedLimit = 100_000

// expiredUnits counts what was charged of loans that ended without a word of who had borrowed.
const expiredUnits = "weir_loan_expired_units_total"

// A counter asks a node: it adds hits to each key and returns how many are left then. 0 stands for not known: on_error has answered.
type counter func(ctx context.Context, keys []string, hits int) (left []int64, err error)

// overRestarts holds a front end to what was counted through it: a fleet of three is restarted node by node, in good order, while the
// nodes that stay are asked. The counts of keys that are only looked at stay as they are, and those of keys that are charged meanwhile
// have all that was admitted, and besides only what nodes had borrowed and could not report in time while its owner restarted.
func overRestarts(t *testing.T, f *fleet, through func(*member) counter) {
	f.start(f.members...)
	f.calm(f.members...)
	keys, charged := keysNamed("kept", 100), keysNamed("charged", 20)
	asked := make(map[*member]counter)
	for _, m := range f.members {
		asked[m] = through(m)
	}
	// each has all keys answered, and asks again where the owner was not reached in time, on a busy machine; so it is not to charge then.
	each := func(m *member, hits int, want int64) {
		t.Helper()
		ask := keys
		testkit.Eventually(t, "the owners to answer", func() bool {
			left, err := asked[m](t.Context(), ask, hits)
			if err != nil {
				t.Fatal(err)
			}
			var again []string
			for i, n := range left {
				switch {
				case n == 0 && hits == 0:
					again = append(again, ask[i])
				case n != want:
					t.Errorf("%s through %s: %d are left, not %d", ask[i], m.name, n, want)
				}
			}
			ask = again
			return len(ask) == 0
		})
	}
	left, expired := int64(countedLimit), int64(0)
	var admitted, unknown [20]int64 // of charged
	for i, m := range f.members {
		others := []*member{f.members[(i+1)%3], f.members[(i+2)%3]}
		left -= 2
		each(others[0], 2, left)
		restarted := make(chan struct{})
		go func() {
			defer close(restarted)
			expired += int64(m.metrics().value(expiredUnits))
			f.leave(m)
			f.start(m)
		}()
		var load sync.WaitGroup
		load.Go(func() {
			for k := 0; ; k++ {
				select {
				case <-restarted:
					return
				case <-time.After(time.Millisecond): // the nodes' clients are not all there is to this machine
				}
				got, err := asked[others[k%2]](t.Context(), charged, 1)
				if err != nil {
					t.Error(err)
					return
				}
				for j, n := range got {
					if n == 0 {
						unknown[j]++
					} else {
						admitted[j]++
					}
				}
			}
		})
		for going := true; going; {
			each(others[0], 0, left)
			select {
			case <-restarted:
				going = false
			default:
			}
		}
		load.Wait()
		f.calm(f.members...)
		each(m, 0, left)
	}
	got, err := asked[f.members[0]](t.Context(), charged, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range f.members {
		expired += int64(m.metrics().value(expiredUnits))
	}
	total, beyond := int64(0), int64(0)
	for j, n := range got {
		used := countedLimit - n
		if used < admitted[j] {
			t.Errorf("%s: %d are used, of %d that were admitted", charged[j], used, admitted[j])
		}
		beyond += max(used-admitted[j]-unknown[j], 0)
		total += admitted[j]
	}
	if beyond > expired {
		t.Errorf("%d more are used than were admitted or may have been, of loans that expired with %d", beyond, expired)
	}
	if total == 0 {
		t.Error("nothing was charged meanwhile")
	}
	t.Logf("%d hits were charged meanwhile; loans expired with %d more", total, expired)
}
