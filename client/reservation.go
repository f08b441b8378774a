package client

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// This file has reservations, and charges for work without a reservation (Charge). The life of a reservation:
//
//  1. Reserve, ReserveN or ReserveWork makes it, or ReserveAll several of them together. The fail policy answers if no
//     node does (grantOne, grantAll).
//  2. Extend adds units, or time.
//  3. CommitEach ends it. Commit and Cancel are CommitEach of one. If no node answers, settle.go repeats the commit.
//
// Words:
//
//	empty    of a reservation: it holds nothing (its id is ""), so its methods do nothing
//	settled  of a reservation: a commit has succeeded, or is under way; settle sets the mark, unsettled removes it
//	safe     of a reservation: the instant before which it has surely not run out. It counts from when the request was
//	         sent, because the owner counts from a later instant
//
// Other files must keep: a commit that has failed for good calls unsettled, or is counted (settling.unsettled).

// Usage is what work has used: tokens by class, such as "input", "cached" and "output", for policies with prices for
// these classes.
type Usage = limit.Usage

// Work is the work that a reservation is for.
type Work struct {
	// Cost is the most that the work may cost, in units. If Cost is 0 and there is no Usage, the policy's estimate
	// applies, or 1 if the policy has none.
	Cost int64
	// Usage replaces Cost.
	Usage Usage
	// Class is the kind of work, such as the name of a model, for policies whose estimate is auto. At most 128 bytes.
	Class string
	// TTL is how long the reservation waits for Commit or Cancel: 1 ms to 1 hour; 0 stands for 1 minute. After that all
	// of it stays charged, or is given back if the policy has on_expiry: release.
	TTL time.Duration
}

// Settled is the result of a commit.
type Settled = limit.Settled

// Reservation is a number of units that are charged for work whose cost is known only afterwards, until Commit or
// Cancel. If neither is called within its ttl, it ends as the policy's on_expiry says (see Work.TTL). Its methods are
// safe for concurrent use; those of a nil *Reservation do nothing. The first Commit or Cancel that succeeds counts and
// later ones do nothing, so that Cancel can be deferred.
type Reservation struct {
	c      *Client
	target limit.Target
	class  string
	id     string // empty: the reservation holds nothing

	mu      sync.Mutex
	units   int64         // charged so far
	safe    time.Duration // by Client.now: the reservation has surely not run out before this
	settled bool          // settled, or being settled
}

// Reserve is short for ReserveN(ctx, key, 1, 0).
func (l *Limiter) Reserve(ctx context.Context, key string) (*Reservation, Decision, error) {
	return l.ReserveN(ctx, key, 1, 0)
}

// ReserveN is ReserveWork for work that costs at most n units, at least 1, with a ttl (see Work.TTL).
func (l *Limiter) ReserveN(ctx context.Context, key string, n int64,
	ttl time.Duration) (*Reservation, Decision, error) {
	if n < 1 {
		return nil, Decision{}, invalid("cost", "must be at least 1, not %d", n)
	}
	return l.ReserveWork(ctx, key, Work{Cost: n, TTL: ttl})
}

// ReserveWork charges the most that some work may cost. The reservation is nil if and only if the decision refuses or
// the error is not nil. The caller should Commit it with the actual cost, or Cancel it, within its ttl, and Extend it
// in time if the work takes longer or costs more. Unlike Reserve of golang.org/x/time/rate it does not reserve a moment
// in the future; a leaky_bucket's Delay is in the Decision.
//
// If no node answers, under FailOpen the Decision is FailedOpen and the reservation is empty: Commit and Cancel do
// nothing, and Extend always succeeds.
func (l *Limiter) ReserveWork(ctx context.Context, key string, w Work) (*Reservation, Decision, error) {
	ck, ask, bad := l.work(key, &w)
	if bad != nil {
		return nil, Decision{}, bad
	}
	ask.RequestID = l.c.requestID()
	asked := l.c.now()
	got, err := l.c.grantOne(ctx, ck, func(ctx context.Context) (Decision, error) { return l.c.svc.Reserve(ctx, ask) })
	if err != nil || !got.Allowed {
		return nil, got, err
	}
	return newReservation(l.c, &got, &ask, asked), got, nil
}

// work returns a Work as a check, and as the message for the Service.
func (l *Limiter) work(key string, w *Work) (*limit.Check, limit.Reserve, *Error) {
	ck := l.check(key, w.Cost)
	ask := limit.Reserve{Target: ck.Target, Amount: limit.Amount{Cost: w.Cost, Usage: w.Usage}, Class: w.Class,
		TTL: w.TTL}
	if w.Cost == 0 && w.Usage == nil {
		ck.Cost, ask.Cost, ask.Estimate = 1, 1, true
	}
	err := valid(ck)
	if err == nil && w.Cost != 0 && w.Usage != nil {
		err = invalid("usage", "must not be given together with cost")
	}
	return ck, ask, err
}

// Claim is one part of a ReserveAll.
type Claim struct {
	Limiter *Limiter
	Key     string
	Work
}

// ReserveAll reserves several claims together, whichever nodes own their keys, such as those of an organization, a team
// and a user: all are charged, or none is. It returns one reservation for each claim, in order; they are nil if and
// only if the decision refuses or the error is not nil. Each is extended, committed and cancelled by itself. Claims of
// the same limit and key are summed: the first has the reservation for all of them, and the others are empty, so that
// their methods do nothing.
//
// If no node answers, the Client's fail policy answers. Under FailOpen it allows all claims, with empty reservations.
func (c *Client) ReserveAll(ctx context.Context, claims []Claim) ([]*Reservation, AllDecision, error) {
	if bad := limit.ValidEach("reserves", len(claims)); bad != nil {
		return nil, AllDecision{}, bad
	}
	cs, asks := make([]limit.Check, len(claims)), make([]limit.Reserve, len(claims))
	for i := range claims {
		ck, ask, bad := claims[i].Limiter.work(claims[i].Key, &claims[i].Work)
		if bad != nil {
			return nil, AllDecision{}, bad.InList("reserves", i)
		}
		cs[i], asks[i] = *ck, ask
	}
	asked := c.now()
	all, err := c.grantAll(ctx, cs, false,
		func(ctx context.Context) (AllDecision, error) { return c.svc.ReserveAll(ctx, asks) })
	if err != nil || !all.Allowed {
		return nil, all, err
	}
	out := make([]*Reservation, len(asks))
	for i := range asks {
		got := all.Decisions[i]
		for _, before := range out[:i] { // of the same limit and key, if there is one
			if before.id != "" && before.sameAs(&asks[i].Target) && got.ReservationID != "" {
				before.units += got.Granted
				got.ReservationID = ""
			}
		}
		out[i] = newReservation(c, &got, &asks[i], asked)
	}
	return out, all, nil
}

// Charge charges n units that have already been used, at least 1, whether or not so many are left. The Decision's
// Allowed says whether so many were left; Granted is how many were charged: n, or fewer under a max_debt. Charge needs
// a role of its own, charge. With WithRetry it is repeated under an id that the Client makes. It fails with
// ErrUnavailable if no node answers; no fail policy answers it.
func (l *Limiter) Charge(ctx context.Context, key string, n int64) (Decision, error) {
	return l.ChargeWithID(ctx, key, n, l.c.requestID())
}

// ChargeWithID is a Charge that may be repeated. Under the same requestID, of at most 128 bytes, units are charged
// once, and a repetition returns the same answer for as long as the cluster remembers it (the window, 1 to 5 minutes).
func (l *Limiter) ChargeWithID(ctx context.Context, key string, n int64, requestID string) (Decision, error) {
	return l.charge(ctx, key, limit.Amount{Cost: n}, requestID)
}

// ChargeUsage is ChargeWithID for tokens, if the policy has prices for them.
func (l *Limiter) ChargeUsage(ctx context.Context, key string, use Usage, requestID string) (Decision, error) {
	return l.charge(ctx, key, limit.Amount{Usage: use}, requestID)
}

func (l *Limiter) charge(ctx context.Context, key string, a limit.Amount, requestID string) (d Decision, err error) {
	ck := l.check(key, a.Cost)
	ck.RequestID = requestID
	if err := valid(ck); err != nil {
		return d, err
	}
	if a.Cost == 0 && len(a.Usage) == 0 {
		return d, invalid("cost", "must be at least 1, or a usage")
	}
	err = l.c.carryOut(ctx, requestID != "", func(ctx context.Context) (err error) {
		d, err = l.c.svc.Charge(ctx, limit.Charge{Target: ck.Target, Amount: a, RequestID: requestID})
		return err
	})
	l.c.observe(ck, &d, err)
	return d, err
}

// Extend adds n units, 0 or more, to the reservation if so many are left, and has it wait for ttl from now on; a ttl of
// 0 does not change how long it waits. If the Decision refuses, nothing has changed, and the work should end. Extend
// fails with ErrNotFound if the reservation has run out. If no node answers, under FailOpen the Decision is FailedOpen,
// and Commit charges what was used beyond the reservation.
func (r *Reservation) Extend(ctx context.Context, n int64, ttl time.Duration) (Decision, error) {
	return r.extend(ctx, limit.Amount{Cost: n}, ttl)
}

// ExtendUsage is Extend by tokens, if the policy has prices for them.
func (r *Reservation) ExtendUsage(ctx context.Context, use Usage, ttl time.Duration) (Decision, error) {
	return r.extend(ctx, limit.Amount{Usage: use}, ttl)
}

func (r *Reservation) extend(ctx context.Context, a limit.Amount, ttl time.Duration) (d Decision, err error) {
	if r == nil || r.id == "" {
		return Decision{Allowed: true, Granted: a.Cost, Limit: Unlimited, Remaining: Unlimited}, nil
	}
	ck := &limit.Check{Target: r.target, Cost: a.Cost, RequestID: r.c.requestID()}
	if err := valid(ck); err != nil {
		return d, err
	}
	if a.Cost == 0 && len(a.Usage) == 0 && ttl == 0 {
		return d, invalid("cost", "must not be 0 when the ttl is 0")
	}
	r.mu.Lock()
	settled := r.settled
	r.mu.Unlock()
	if settled {
		return d, limit.NewError(ErrNotFound, "reservation_id", "has been settled")
	}
	asked, extended := r.c.now(), false
	d, err = r.c.grantOne(ctx, ck, func(ctx context.Context) (Decision, error) {
		d, err := r.c.svc.Extend(ctx,
			limit.Extend{Target: r.target, Amount: a, ReservationID: r.id, TTL: ttl, RequestID: ck.RequestID})
		extended = err == nil && d.Allowed
		return d, err
	})
	if extended {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.units += d.Granted
		if ttl != 0 && !d.FailedOpen {
			r.safe = asked + limit.Shortened(ttl)
		}
	}
	return d, err
}

// Commit ends the reservation: cost units stay charged, and the rest is given back. If cost exceeds the reservation,
// the excess is charged, whether or not so many units are left. Commit takes at most the client's timeout. If no node
// answers in that time, Commit returns nil, and the Client repeats it in the background until the reservation's ttl has
// passed. Stats has how many reservations are being settled so, and how many the Client has given up. Commit fails with
// ErrNotFound if the reservation has run out, and with ErrUnavailable if no node answers and 4096 reservations are
// being settled; the caller may then call it again.
func (r *Reservation) Commit(cost int64) error {
	_, err := r.CommitCost(cost)
	return err
}

// CommitCost is Commit, and returns what it has changed: the zero Settled if no node has answered yet.
func (r *Reservation) CommitCost(cost int64) (Settled, error) {
	return r.end(limit.Amount{Cost: cost})
}

// CommitUsage is Commit for tokens, if the policy has prices for them.
func (r *Reservation) CommitUsage(use Usage) (Settled, error) {
	if len(use) == 0 {
		return Settled{}, invalid("usage", "must not be empty")
	}
	return r.end(limit.Amount{Usage: use})
}

// Units returns how many units are reserved.
func (r *Reservation) Units() int64 {
	if r == nil {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.units
}

// Cancel ends the reservation and gives all of it back. It takes as long as Commit, and fails for the same reasons.
func (r *Reservation) Cancel() error {
	_, err := r.end(limit.Amount{})
	return err
}

func (r *Reservation) end(a limit.Amount) (Settled, error) {
	if r == nil || r.id == "" {
		return Settled{}, nil
	}
	got, err := r.c.CommitEach([]Cost{{r, a.Cost, a.Usage}})
	if err != nil {
		return Settled{}, err
	}
	return got[0].Settled, got[0].Err
}

// commit returns the message that ends the reservation.
func (r *Reservation) commit(a limit.Amount) limit.Commit {
	ask := limit.Commit{Target: r.target, Amount: a, ReservationID: r.id}
	if a.Cost > 0 || a.Usage != nil {
		ask.Class = r.class
	}
	return ask
}

// settle marks the reservation as being settled. It returns false if it is marked already, or holds nothing.
func (r *Reservation) settle() bool {
	if r == nil || r.id == "" {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	first := !r.settled
	r.settled = true
	return first
}

// unsettled ends the mark of settle, because the commit has failed.
func (r *Reservation) unsettled() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settled = false
}

// Cost is what the work of a reservation has cost.
type Cost struct {
	Reservation *Reservation
	Units       int64 // 0, with no Usage: the work did not take place
	Usage       Usage // replaces Units
}

// SettledResult is the answer to one commit of several: Settled, or an error.
type SettledResult = limit.SettledResult

// CommitEach is Commit for up to 1000 reservations in one call, such as those of one ReserveAll. Each has its own
// result, in order, or is settled in the background as by Commit. The error of the call means that the costs are
// invalid, or that the Client is closed.
func (c *Client) CommitEach(costs []Cost) ([]SettledResult, error) {
	if bad := limit.ValidEach("commits", len(costs)); bad != nil && len(costs) > 0 {
		return nil, bad
	}
	list := "" // the prefix of a field in errors
	if len(costs) > 1 {
		list = "commits"
	}
	for i, cost := range costs {
		switch r := cost.Reservation; {
		case r != nil && r.c != c:
			return nil, invalid("reservation", "is of another Client").InList(list, i)
		case cost.Units < 0 || cost.Units > algo.MaxLimit, cost.Units > 0 && cost.Usage != nil:
			return nil, invalid("cost", "must be 0 to 2^53, and 0 beside usage").InList(list, i)
		}
	}
	var open []int // the reservations that this call settles
	var asks []limit.Commit
	for i, cost := range costs {
		if r := cost.Reservation; r.settle() {
			defer c.memory.forget(&r.target)
			open, asks = append(open, i), append(asks, r.commit(limit.Amount{Cost: cost.Units, Usage: cost.Usage}))
		}
	}
	results := make([]SettledResult, len(costs))
	if len(open) == 0 {
		return results, nil
	}
	var got []SettledResult
	err := c.begin(c.ctx)
	if err == nil {
		defer c.running.Done()
		_, err = c.attempt(c.ctx, true, func(ctx context.Context) (err error) {
			got, err = c.commitEach(ctx, asks)
			return err
		})
	}
	for k, i := range open {
		r, result := costs[i].Reservation, &results[i]
		if result.Err = err; err == nil {
			*result = got[k]
		}
		if unavailable(result.Err) && c.settleLater(r, asks[k]) {
			result.Err = nil
		}
		if result.Err != nil {
			r.unsettled()
		}
	}
	if unavailable(err) {
		err = nil // each result has the error
	}
	return results, err
}

// commitEach commits one reservation or several. If there is only one and no node answers, it returns that error as
// that of the call, so that attempt tries again.
func (c *Client) commitEach(ctx context.Context, asks []limit.Commit) ([]SettledResult, error) {
	if len(asks) > 1 {
		return c.svc.CommitEach(ctx, asks)
	}
	got, err := c.svc.Commit(ctx, asks[0])
	if unavailable(err) || err != nil && ctx.Err() != nil {
		return nil, err
	}
	return []SettledResult{{Settled: got, Err: err}}, nil
}

// sameAs reports whether the reservation is of this limit and key.
func (r *Reservation) sameAs(t *limit.Target) bool {
	return r.target.Key == t.Key && scopeOf(&r.target) == scopeOf(t)
}

// newReservation returns the reservation that the answer to ask granted. asked is when ask was sent.
func newReservation(c *Client, got *Decision, ask *limit.Reserve, asked time.Duration) *Reservation {
	return &Reservation{
		c: c, target: ask.Target, class: ask.Class, id: got.ReservationID, units: got.Granted,
		safe: asked + limit.Shortened(cmp.Or(ask.TTL, limit.DefaultReservation)),
	}
}
