package clustertest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
)

// asked is a check or a reservation with a request id, of a key of its own, whose limit is 10.
type asked struct {
	target      *weirv1.Target
	id          string
	reserve     bool
	answered    bool // in time: admitted
	reservation string
}

// ask asks through a member.
func (q *asked) ask(ctx context.Context, m *member) (d *weirv1.Decision, err error) {
	if q.reserve {
		return m.limiter.Reserve(ctx, &weirv1.ReserveRequest{Target: q.target, RequestId: q.id, TtlNs: int64(time.Hour)})
	}
	out, err := m.limiter.Check(ctx, &weirv1.CheckRequest{Checks: []*weirv1.Check{{Target: q.target, RequestId: q.id}}})
	if err != nil {
		return nil, err
	}
	if e := out.Results[0].GetError(); e != nil {
		return nil, fmt.Errorf("%v", e)
	}
	return out.Results[0].GetDecision(), nil
}

// killInBurst asks all through a member, and kills another one half-way.
func killInBurst(t *testing.T, all []*asked, through, victim *member) {
	var burst sync.WaitGroup
	answered, work := make(chan struct{}, len(all)), make(chan *asked)
	for range 100 {
		burst.Go(func() {
			for q := range work {
				if d, err := q.ask(t.Context(), through); err == nil && d.Allowed && !d.FailedClosed && !d.Degraded {
					q.answered, q.reservation = true, d.ReservationId
				}
				answered <- struct{}{}
			}
		})
	}
	burst.Go(func() {
		defer close(work)
		for _, q := range all {
			work <- q
		}
	})
	for range len(all) / 2 {
		<-answered
	}
	victim.kill()
	burst.Wait()
}

// TestIDsOverAKill kills a node in a burst of request ids with long keys, under escrow and sync. Every id is then repeated: it is charged once, and
// each reservation whose id was answered is there.
func TestIDsOverAKill(t *testing.T) {
	plainOnly(t)
	t.Parallel()
	policies := []checker.Policy{
		{Name: "escrow", Durability: checker.Escrow, Limit: 10, Window: time.Hour}, {Name: "sync", Durability: checker.Sync, Limit: 10, Window: time.Hour},
	}
	f := newFleet(t, 3, policiesFile(policies), nil)
	f.start(f.members...)
	f.calm(f.members...)
	f.decided(f.members[0], "probe-strict") // before the voters answer, answers say that they are degraded
	victim, rest := f.members[1], f.members[:1]
	var all []*asked
	for i := range 1500 {
		key := fmt.Sprint(strings.Repeat("k", 900), i)
		all = append(all, &asked{target: targetOf(policies[i%2].Name, key), id: fmt.Sprint("id-", i), reserve: i%5 == 0})
	}
	killInBurst(t, all, rest[0], victim)
	f.decided(rest[0], "probe")
	var lost, twice, uncharged, unknown, told int
	for _, q := range all {
		before := rest[0].peekAt(q.target.GetPolicy(), q.target.Key).Remaining
		d, err := q.ask(t.Context(), rest[0])
		if err != nil || !d.Allowed {
			if q.answered {
				lost++
			}
			continue
		}
		if q.answered {
			told++
		}
		switch left := rest[0].peekAt(q.target.GetPolicy(), q.target.Key).Remaining; {
		case left == 10:
			uncharged++
		case left < before && q.answered:
			twice++
		}
		if q.answered && q.reserve {
			_, err := rest[0].limiter.Commit(t.Context(), &weirv1.CommitRequest{Target: q.target, ReservationId: q.reservation, Cost: proto.Int64(1)})
			if grpcstatus.Code(err) == codes.NotFound {
				unknown++
			}
		}
	}
	t.Logf("%d of %d were answered as admitted before", told, len(all))
	expect.True(t, lost+twice+uncharged+unknown <= 0 && told >= len(all)/2,
		"%d were refused when they were repeated, %d charged twice, %d not charged, %d reservations unknown", lost, twice, uncharged, unknown)
}

// TestStrictLoansApart cuts the owners and copies of some keys off from the voters, and kills both later, while borrowers on both sides spend
// what they have on loan: of strict policies nothing is admitted beyond the limit.
func TestStrictLoansApart(t *testing.T) {
	plainOnly(t)
	survival(t)
	cut := newNetwork(t, 7)
	policies := []checker.Policy{
		{Name: "strict-sync", Durability: checker.Sync}, {Name: "strict-escrow", Durability: checker.Escrow},
		{Name: "strict-bucket", Kind: checker.Bucket, Durability: checker.Sync},
	}
	for i := range policies {
		p := &policies[i]
		p.Strict, p.Limit, p.Capacity, p.Window, p.Lent = true, lentLimit, lentLimit, 12*time.Second, time.Second
	}
	f := newFleet(t, 5, policiesFile(policies), cut)
	n := f.members
	l := lend(f, policies)
	plan := borrowerPlan{Clients: 2, Rate: 1000, Every: int64(time.Second), Keys: 8, Newest: 40}
	l.borrow(cut.inside(5), plan, policies)
	l.borrow(cut.inside(6), plan, policies)
	l.goesOn(2000)

	few, many := []int{3, 4, 5}, []int{0, 1, 2, 6}
	alive := l.gone(n...)
	t.Log(l.clock(l.now()), "n4 and n5 are cut off")
	cut.cut(few, many)
	cut.cut(many, few)
	f.decided(n[0], "probe-strict")
	l.goesOn(1000)
	cut.heal()
	t.Logf("%s healed: calm after %v", l.clock(l.now()), f.calm(n...).Round(time.Millisecond))
	l.goesOn(1000)

	for _, m := range n[3:] {
		l.kill(m)
	}
	t.Log(l.clock(l.now()), "n4 and n5 are killed")
	f.decided(n[0], "probe-strict")
	l.goesOn(1000)
	alive()
	for _, b := range l.borrowers {
		b.end()
	}
	l.judge()
}
