package store

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// TestBurstOfIDs: the owner is lost while it tells its copy of a burst of request ids of a long key, in chunks of the
// size that nodes send. Whatever has arrived, all answers of both nodes together admit the limit and no more.
func TestBurstOfIDs(t *testing.T) {
	const burst = 1000
	r := rule("p", log(burst, minute)).under(Sync)
	key := strings.Repeat("k", 1024)
	check := func(i int) Call { return Call{Request: algo.Request{Cost: 1}, RequestID: fmt.Sprint("id", i)} }
	for arrived, chunks := 0, 1; arrived <= chunks; arrived++ {
		holder, copied := New(Config{}), New(Config{Shut: true})
		l := newLink(holder, copied, ownership.Backup)
		l.most = 192 << 10
		holder.TakeOver(0, at(0))
		l.sync(t, 0, true)
		tickets, confirmed := make([]uint64, burst), uint64(0)
		for i := range tickets {
			tickets[i] = answer(t, holder, r, key, at(0), check(i)).Ticket
		}
		for chunks = 0; holder.Pending(0, ownership.Backup) > 0; chunks++ {
			l.drain(0)
		}
		for staged := false; len(l.queue) > chunks-arrived; {
			confirmed = l.queue[0].version
			l.deliver(t, 0, &staged)
		}
		take(copied, l.there(0))
		admitted := 0
		for i, ticket := range tickets {
			before := decide(t, copied, r, key, l.there(0), cost(0)).Remaining
			if a := decide(t, copied, r, key, l.there(0), check(i)); a.Allowed {
				admitted++
				must.True(t, ticket > confirmed || a.Remaining == before,
					"%d of %d chunks arrived: id %d was answered and is charged twice", arrived, chunks, i)
			} else if ticket <= confirmed {
				t.Fatalf("%d of %d chunks arrived: id %d was answered as admitted and is refused", arrived, chunks, i)
			}
		}
		for i := burst; decide(t, copied, r, key, l.there(0), check(i)).Allowed; i++ {
			admitted++
		}
		expect.True(t, admitted <= burst,
			"%d of %d chunks arrived: %d of %d were admitted", arrived, chunks, admitted, burst)
		if arrived == chunks && (chunks < 4 || confirmed < tickets[burst-1]) {
			t.Errorf("%d chunks, version %d of %d confirmed", chunks, confirmed, tickets[burst-1])
		}
	}
}

// TestIDsOverACrash: the owner is lost after any part of what it had to tell. Callers then repeat all that they have
// asked for, under the same ids: what is in use is not less than after one owner. An id that the copy has confirmed is
// not charged again.
func TestIDsOverACrash(t *testing.T) {
	for seed := range seeds(400) {
		rng := rand.New(rand.NewPCG(seed, 1))
		r := rule("p", log(1<<20, time.Hour))
		r.Durability = []Durability{Async, Escrow, Sync}[rng.IntN(3)]
		holder, copied := New(Config{}), New(Config{Shut: true})
		l := newLink(holder, copied, ownership.Backup)
		l.most = 1 << (4 + rng.IntN(8))
		holder.TakeOver(0, at(0))
		followed := rng.IntN(4) > 0 // otherwise the ids are a part of the whole copy
		if followed {
			l.sync(t, 0, true)
		}
		var asked []*asks
		want, confirmed := make(map[string]int64), uint64(0)
		for i := range 20 + rng.IntN(60) {
			if rng.IntN(4) == 0 && followed {
				l.drain(0)
			}
			if rng.IntN(6) == 0 && len(l.queue) > 0 {
				confirmed = max(confirmed, l.queue[0].version)
				l.deliver(t, 0, new(bool))
			}
			a := &asks{kind: rng.IntN(4), id: fmt.Sprint("id", i), key: fmt.Sprint(rng.IntN(3)),
				units: 1 + rng.Int64N(5), excess: rng.Int64N(3)}
			want[a.key] += a.do(t, holder, r, at(0), reservationOf(uint64(1+i)))
			asked = append(asked, a)
		}
		if !followed {
			l.attach(true)
			l.drain(0)
			for staged := true; staged; l.drain(0) {
				l.deliver(t, 0, &staged)
			}
		}
		for range rng.IntN(len(l.queue) + 1) {
			confirmed = max(confirmed, l.queue[0].version)
			l.deliver(t, 0, new(bool))
		}
		take(copied, l.there(0))
		for i, a := range asked {
			before := decide(t, copied, r, a.key, l.there(0), cost(0)).Remaining
			most := a.again(confirmed)
			a.do(t, copied, r, l.there(0), reservationOf(uint64(1000+i)))
			after := decide(t, copied, r, a.key, l.there(0), cost(0)).Remaining
			must.True(t, r.Durability < Escrow || before-after <= most,
				"seed %d: %+v is charged %d again, want at most %d", seed, a, before-after, most)
		}
		for key, used := range want {
			if left := decide(t, copied, r, key, l.there(0), cost(0)).Remaining; 1<<20-left < used {
				t.Fatalf("seed %d: of %s %d are in use, want at least %d", seed, key, 1<<20-left, used)
			}
		}
	}
}

// asks is something that a caller asks for, and repeats.
type asks struct {
	kind          int
	id, key       string
	units, excess int64
	tickets       [2]uint64 // of the charge and of the excess
}

// again is the most that a repetition may charge: what the caller was not told of before.
func (a *asks) again(confirmed uint64) (n int64) {
	if a.tickets[0] > confirmed {
		n += a.units
	}
	if a.tickets[1] > confirmed {
		n += a.excess
	}
	return n
}

// do asks a node, and returns what is in use more.
func (a *asks) do(t *testing.T, s *Store, r *Rule, now algo.Instant, draw ReservationID) int64 {
	t.Helper()
	k := s.key(r.Scope, a.key)
	switch a.kind {
	case 0: // a refund
		n := must.Value(s.Refund(k, r, now, a.units, a.id, ""))(t)
		return -n
	case 1: // a reservation, and a commit of all of it, or more
		c := Call{Request: algo.Request{Cost: a.units}, RequestID: a.id, Reservation: draw, ReserveFor: minute}
		held := answer(t, s, r, a.key, now, c)
		done := must.Value(s.Settle(k, r, now, Settlement{ID: held.Reservation, Keep: a.units + a.excess}))(t)
		a.tickets = [2]uint64{held.Ticket, done.Ticket}
		return a.units + a.excess
	default:
		a.tickets[0] = answer(t, s, r, a.key, now, withID(a.units, a.id)).Ticket
		return a.units
	}
}

// answer decides a call.
func answer(t *testing.T, s *Store, r *Rule, key string, now algo.Instant, c Call) Answer {
	t.Helper()
	a := must.Value(s.Decide(s.key(r.Scope, key), r, now, c, nil))(t)
	return a
}
