package limiter

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/cluster/ownership"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
	"github.com/weirlimit/weir/store"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// copied is a node that holds everything, and whose backup confirms what it is asked for, or does not.
type copied struct {
	alone
	mu      sync.Mutex
	tickets int
	strict  int // of these
	silent  bool
	lost    bool // there is no copy any more
}

func (c *copied) AwaitProgress(_ context.Context, _ int, _ uint64, strict bool) (degraded, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tickets++; strict {
		c.strict++
	}
	return c.lost, !c.silent
}

// copiedData is a store all of whose partitions have a current copy, and lease for strict rules until the end of time.
func copiedData() *store.Store {
	data := NewStore(store.Config{Urgent: func(int) {}}, false)
	for p := range ring.Partitions {
		data.Open(p)
		data.AttachCurrent(p, ownership.Backup, false)
		data.Caught(p, ownership.Backup)
		data.Lease(p, math.MaxInt64)
	}
	return data
}

// TestAnswersSayHowTheyWaited: whoever waits for a copy says whether the answer is under a strict rule, and an answer
// says whether there was no copy after all; a quota of which none knows is not given.
func TestAnswersSayHowTheyWaited(t *testing.T) {
	own := &copied{alone: alone{Standing: ownership.Owned}, lost: true}
	l := started(t, Config{Store: copiedData(), Ownership: own, BootClock: func() int64 { return 1 }, Policies: policies(t, `policies:
  - {name: sync, algorithm: sliding_log, limit: 10, window: 1h, durability: sync}
  - {name: strict, algorithm: sliding_log, limit: 10, window: 1h, durability: sync, consistency: strict}
  - {name: bucket, algorithm: token_bucket, limit: 36000, window: 1h, durability: sync}`)})
	for i, policy := range []string{"sync", "strict"} {
		if d := check(t, l, policy, 1); !d.Allowed || !d.Degraded || own.tickets != i+1 || own.strict != i {
			t.Errorf("%s: %+v, %d waited, %d of them under a strict rule", policy, d, own.tickets, own.strict)
		}
	}
	for _, own.lost = range []bool{true, false} {
		q := limit.Quota{
			Target: onPolicy("bucket", fmt.Sprint(own.lost)), ID: loanID,
			Ask: algo.Quota{Demand: 7200, Term: time.Minute},
		}
		out := make([]limit.QuotaLent, 1)
		if err := l.Quota(t.Context(), []limit.Quota{q}, out); err != nil || out[0].Err != nil ||
			out[0].Granted > 0 == own.lost || out[0].Rate > 0 == own.lost {
			t.Errorf("without a copy %v: %+v, %v", own.lost, out[0], err)
		}
	}
}

// TestAnswerAtTheEndOfALease: an answer is not used from the instant on at which its lease ends.
func TestAnswerAtTheEndOfALease(t *testing.T) {
	l := started(t, Config{BootClock: func() int64 { return 7 },
		Policies: policies(t, "policies: [{name: p, limits: [9/1m], on_error: closed}]")})
	for until, used := range map[int64]bool{6: false, 7: false, 8: true} {
		op := &Op{Kind: OpCheck, Check: new(named("p", "k", 1))}
		must.Equal(t, l.plan(l.table.Load(), op), nil)
		op.Decision.Allowed, op.Outcome.until = true, until
		end := l.ending()
		l.end(op, &end)
		expect.True(t, op.Decision.Allowed == used, "at 7 an answer until %d: %+v", until, op.Decision)
		// A peer is not told of none left: that would be for ever.
		told := &Op{Kind: OpCheck, Hops: 1, Outcome: Outcome{until: until}}
		if l.end(told, &end); told.Outcome.Unreachable == used || told.Outcome.Lease > 0 != used {
			t.Errorf("at 7 a peer is told of an answer until %d: %+v", until, told.Outcome)
		}
	}
}

// TestAnswersWaitForTheirCopy: what has to be with a copy first is charged once, answered once the copy has it, and by
// on_error when it never gets it; and what need not wait does not.
func TestAnswersWaitForTheirCopy(t *testing.T) {
	own, data := &copied{alone: alone{Standing: ownership.Owned}}, NewStore(store.Config{Urgent: func(int) {}}, false)
	l := started(t, Config{Store: data, Ownership: own, Policies: policies(t, `policies:
  - {name: async, algorithm: sliding_log, limit: 10, window: 1h}
  - {name: escrow, algorithm: sliding_log, limit: 1000, window: 1h, durability: escrow}
  - {name: sync, algorithm: sliding_log, limit: 10, window: 1h, durability: sync, on_error: closed}
  - {name: leases, algorithm: concurrency, limit: 10, ttl: 1h, durability: sync}
  - {name: banned, algorithm: sliding_log, limit: 1, window: 1h, durability: sync, ban: 2h}`)})
	confirm := func() {
		for p := range ring.Partitions {
			if data.Pending(p, ownership.Backup) > 0 {
				_, version, _ := data.Drain(p, ownership.Backup, algo.Instant{}, 1<<20)
				data.Confirm(p, ownership.Backup, version)
			}
		}
	}
	for p := range ring.Partitions {
		data.Open(p)
		data.Attach(p, ownership.Backup, false)
	}
	confirm()
	for p := range ring.Partitions {
		data.Caught(p, ownership.Backup)
	}
	ask := func(checks ...limit.Check) []limit.Result {
		t.Helper()
		got := must.Value(l.Check(t.Context(), checks))(t)
		return got
	}
	waits := func(want int, what string) {
		t.Helper()
		own.mu.Lock()
		defer own.mu.Unlock()
		expect.True(t, own.tickets == want, "%s: %d answers waited, want %d", what, own.tickets, want)
		own.tickets = 0
	}
	for i, r := range ask(named("sync", "k", 1), named("async", "k", 1), named("sync", "k", 2),
		named("sync", "other", 1)) {
		if want := []int64{9, 9, 7, 9}[i]; !r.Allowed || r.Remaining != want || r.FailedClosed || r.Degraded {
			t.Errorf("check %d: %+v, want %d left", i, r, want)
		}
	}
	waits(3, "sync")
	r := ask(named("sync", "k", 8))[0]
	expect.True(t, !r.Allowed && r.Remaining == 7, "%+v", r)
	waits(0, "a refusal")
	ask(named("escrow", "k", 1))
	waits(1, "a key of which the copy knows nothing")
	confirm()
	for i := range 40 {
		r := ask(named("escrow", "k", 1))[0]
		must.True(t, r.Allowed && r.Remaining == int64(998-i), "%+v", r)
	}
	waits(0, "what the copy was told before")
	own.silent = true
	r = ask(named("sync", "k", 1))[0]
	expect.True(t, !r.Allowed && r.FailedClosed, "a copy that does not answer: %+v", r)
	own.silent = false
	r = ask(named("sync", "k", 0))[0]
	expect.Equal(t, r.Remaining, 6, "%+v: what was not confirmed stays charged, once", r)
	var sum PolicyStats
	for _, s := range l.ReadStats() {
		if s.Policy == "sync" {
			sum = s
		}
	}
	expect.Equal(t, fmt.Sprint(sum.Allowed, sum.Refused, sum.FailedClosed), "3 1 1",
		"counted allowed, refused, failed closed")

	jobs := onPolicy("leases", "k")
	lease, err := l.Acquire(t.Context(), limit.Acquire{Target: jobs, Cost: 1})
	must.NoError(t, err)
	confirm()
	own.tickets = 0
	expect.NoError(t, expect.Err(l.Renew(t.Context(), jobs, lease.LeaseID, time.Hour)))
	waits(1, "a renewal")
	held := must.Value(l.Reserve(t.Context(), limit.Reserve{Target: onPolicy("sync", "held"), Amount: units(1)}))(t)
	confirm()
	own.tickets = 0
	_, err = l.Commit(t.Context(),
		limit.Commit{Target: onPolicy("sync", "held"), ReservationID: held.ReservationID, Amount: units(3)})
	expect.NoError(t, err)
	waits(1, "a commit of more than was reserved")

	ask(named("banned", "k", 1), named("banned", "l", 1))
	own.tickets = 0
	r = ask(named("banned", "k", 1))[0]
	expect.True(t, !r.Allowed && r.Banned, "the refusal that begins a ban: %+v", r)
	waits(1, "a ban")
	confirm()
	r = ask(named("banned", "k", 1))[0]
	expect.True(t, !r.Allowed && r.Banned, "during a ban: %+v", r)
	waits(0, "during a ban")
	// What is refused is not admitted because no copy knows of the ban, whatever on_error says.
	own.silent = true
	r = ask(named("banned", "l", 1))[0]
	expect.True(t, !r.Allowed && r.Banned && !r.FailedOpen, "a ban of which the copy does not hear: %+v", r)
	if got := l.Counts(); !slices.ContainsFunc(got, func(s PolicyStats) bool {
		return s.Policy == "banned" && s.Allowed == 2 && s.Refused == 3 && s.Banned == 3 && s.Bans == 2 &&
			s.FailedOpen == 0
	}) {
		t.Errorf("counted %+v", got)
	}
	for i := range 2 { // the second begins a ban
		charge := named("banned", "m", 1)
		charge.Always = true
		r := ask(charge)[0]
		expect.True(t, !r.Banned && r.FailedOpen, "charge %d of which the copy does not hear: %+v", i, r)
	}
}

// TestLoansWaitForTheirCopy: a loan is given once a copy knows of it, and not if none is going to. Under a strict rule
// that is what is waited for, and without a lease nothing is lent.
func TestLoansWaitForTheirCopy(t *testing.T) {
	own, data, boot := &copied{alone: alone{Standing: ownership.Owned}}, copiedData(), int64(1)
	l := started(t, Config{Store: data, Ownership: own, BootClock: func() int64 { return boot }, Policies: policies(t, `policies:
  - {name: sync, algorithm: sliding_log, limit: 100, window: 1h, durability: sync}
  - {name: strict, algorithm: sliding_log, limit: 100, window: 1h, durability: sync, consistency: strict}`)})
	for i, policy := range []string{"sync", "strict"} {
		b := limit.Borrow{Target: onPolicy(policy, "k"), ID: algo.LoanID{Borrower: 1, Number: uint64(i + 1)}, Want: 16}
		own.tickets, own.strict = 0, 0
		for _, c := range []struct {
			what         string
			silent, lost bool
			granted      int64
		}{{"a copy that does not answer", true, false, 0}, {"no copy any more", false, true, 0},
			{"a copy that confirms", false, false, 16}} {
			own.silent, own.lost = c.silent, c.lost
			if a := lent(t, l, b); a.Granted != c.granted || a.Term > 0 != (c.granted > 0) || a.Ended {
				t.Errorf("%s, %s: %+v", policy, c.what, a)
			}
		}
		expect.True(t, own.tickets == 3 && own.strict == 3*i,
			"%s: %d waited, %d of them under a strict rule", policy, own.tickets, own.strict)
	}
	const until = 500 * time.Millisecond
	for p := range ring.Partitions {
		data.Lease(p, int64(until))
	}
	for now, granted := range map[time.Duration]int64{until / 5: 16, until - time.Millisecond: 0, until: 0} {
		boot = int64(now)
		b := limit.Borrow{Target: onPolicy("strict", "other"), ID: algo.LoanID{Borrower: 2, Number: uint64(now)},
			Want: 16}
		a := lent(t, l, b)
		expect.True(t, a.Granted == granted && a.Term <= until-now, "at %v, with a lease until 500ms: %+v", now, a)
	}
}
