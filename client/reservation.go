package client

import (
	"cmp"
	"context"
	"sync"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
)

// The life of a reservation: Reserve or ReserveAll makes it, Extend adds to it, CommitEach ends it (Commit and Cancel are CommitEach of one).
// What no node answers then is settled in the background (settle.go). Charge is for work without a reservation.

// Usage is what work has used: tokens by class, such as "input", "cached" and "output", for policies that have prices for them.
type Usage = limit.Usage

// Work says what a reservation is for.
type Work struct {
	// Cost is the most that the work may cost, in units. 0, with no Usage, leaves it to the policy's estimate; 1 where it has none.
	Cost int64
	// Usage stands in place of Cost.
	Usage Usage
	// Class is of what kind the work is, such as the name of a model, for policies whose estimate is auto. At most 128 bytes.
	Class string
	// TTL is how long the reservation waits for Commit or Cancel: 1 ms to 1 hour, 0 stands for 1 minute. Past that all of it stays
	// charged.
	TTL time.Duration
}

// Settled is what a commit has changed.
type Settled = limit.Settled

// Reservation is a number of units that are charged for work whose cost is known only afterwards, until Commit or
// Cancel. One that hears neither within its ttl stays charged in full. Its methods are safe for concurrent use; those
// of a nil *Reservation do nothing. The first Commit or Cancel that succeeds counts, and those after it do nothing, so
// that Cancel can be deferred.
type Reservation struct {
	c      *Client
	target limit.Target
	class  string
	id     string // empty: nothing is held, and there is nothing to settle

	mu      sync.Mutex
	units   int64         // that are charged
	safe    time.Duration // of Client.now: before, the reservation has surely not run out
	settled bool          // or being settled
}

// Reserve is short for ReserveN(ctx, key, 1, 0).
func (l *Limiter) Reserve(ctx context.Context, key string) (*Reservation, Decision, error) {
	return l.ReserveN(ctx, key, 1, 0)
}

// ReserveN is ReserveWork for work that costs at most n units, n being at least 1, with a ttl.
func (l *Limiter) ReserveN(ctx context.Context, key string, n int64, ttl time.Duration) (*Reservation, Decision, error) {
	if n < 1 {
		return nil, Decision{}, invalid("cost", "must be at least 1, not %d", n)
	}
	return l.ReserveWork(ctx, key, Work{Cost: n, TTL: ttl})
}

// ReserveWork charges the most that some work may cost. The reservation is nil if and only if the decision refuses or the error is
// not nil. Commit it with the actual cost, or Cancel it, within its ttl: past that all of it stays charged. Extend it in time when
// the work takes longer or costs more. Unlike that of golang.org/x/time/rate it does not reserve a moment in the future; a
// leaky_bucket's Delay is in the Decision.
//
// Under FailOpen, when no node can be asked, the Decision is FailedOpen and the reservation an empty one: settling it does
// nothing, and extending it is admitted.
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

// work is a Work as a check, and as it is sent.
func (l *Limiter) work(key string, w *Work) (*limit.Check, limit.Reserve, *Error) {
	ck := l.check(key, w.Cost)
	ask := limit.Reserve{Target: ck.Target, Amount: limit.Amount{Cost: w.Cost, Usage: w.Usage}, Class: w.Class, TTL: w.TTL}
	if w.Cost == 0 && w.Usage == nil {
		ck.Cost, ask.Cost, ask.Estimate = 1, 1, true
	}
	err := valid(ck)
	if err == nil && w.Cost != 0 && w.Usage != nil {
		err = invalid("usage", "must not be given together with cost")
	}
	return ck, ask, err
}

// Claim is one part of what ReserveAll reserves.
type Claim struct {
	Limiter *Limiter
	Key     string
	Work
}

// ReserveAll reserves several claims together, on whatever nodes, such as those of an organization, a team and a user: all are
// charged, or none is. The reservations, one for each claim and in its place, are nil if and only if the decision refuses or the
// error is not nil. Each is extended, committed and cancelled by itself. Claims of the same limit and key are summed into one: the
// first has the reservation of both, and the others empty ones, for which all calls do nothing.
//
// When no node can be asked the answer is the claims' fail policies' together: admitted, with empty reservations, if all of them
// fail open.
func (c *Client) ReserveAll(ctx context.Context, claims []Claim) ([]*Reservation, AllDecision, error) {
	if len(claims) == 0 || len(claims) > limit.MaxBatch {
		return nil, AllDecision{}, invalid("reserves", "must be 1 to %d, not %d", limit.MaxBatch, len(claims))
	}
	cs, asks := make([]limit.Check, len(claims)), make([]limit.Reserve, len(claims))
	for i := range claims {
		ck, ask, bad := claims[i].Limiter.work(claims[i].Key, &claims[i].Work)
		if bad != nil {
			return nil, AllDecision{}, bad
		}
		cs[i], asks[i] = *ck, ask
	}
	asked := c.now()
	all, err := c.grantAll(ctx, cs, false, func(ctx context.Context) (AllDecision, error) { return c.svc.ReserveAll(ctx, asks) })
	if err != nil || !all.Allowed {
		return nil, all, err
	}
	out := make([]*Reservation, len(asks))
	for i := range asks {
		got := all.Decisions[i]
		for _, before := range out[:i] { // of the same limit and key
			if before.id != "" && before.sameAs(&asks[i].Target) && got.ReservationID != "" {
				before.units += got.Granted
				got.ReservationID = ""
			}
		}
		out[i] = newReservation(c, &got, &asks[i], asked)
	}
	return out, all, nil
}

// Charge adds n units that have already been used, n being at least 1, whether or not there is room for them: the Decision's
// Allowed says whether there was, and Granted what was charged, which is n but for a max_debt. It takes a role of its own, charge.
// With WithRetry it is repeated under an id of the client's own. It fails with ErrUnavailable when no node could be asked; no fail
// policy answers for it.
func (l *Limiter) Charge(ctx context.Context, key string, n int64) (Decision, error) {
	return l.ChargeWithID(ctx, key, n, l.c.requestID())
}

// ChargeWithID is a Charge that may be repeated: under the same requestID, of at most 128 bytes, units are charged once, and the
// answer is the same again for as long as the cluster remembers it (the window, 1 to 5 minutes).
func (l *Limiter) ChargeWithID(ctx context.Context, key string, n int64, requestID string) (Decision, error) {
	return l.charge(ctx, key, limit.Amount{Cost: n}, requestID)
}

// ChargeUsage is ChargeWithID for tokens of which the policy has the prices.
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

// Extend adds n units to the reservation, n being 0 or more, if there is room for them, and lets it wait for ttl from now on; a ttl
// of 0 leaves that as it was. When the Decision refuses nothing has changed: the work had better end. It fails with ErrNotFound when
// the reservation has run out. Under FailOpen, when no node can be asked, the Decision is FailedOpen, and what is used beyond the
// reservation is charged by Commit.
func (r *Reservation) Extend(ctx context.Context, n int64, ttl time.Duration) (Decision, error) {
	return r.extend(ctx, limit.Amount{Cost: n}, ttl)
}

// ExtendUsage is Extend by tokens of which the policy has the prices.
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
		d, err := r.c.svc.Extend(ctx, limit.Extend{Target: r.target, Amount: a, ReservationID: r.id, TTL: ttl, RequestID: ck.RequestID})
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

// Commit ends the reservation: cost units stay charged, the rest is given back, and what exceeds the reservation is charged, whether
// or not there is room for it. It takes at most the client's timeout. When no node answers in that time it returns nil, and the Client
// goes on in the background until the reservation's ttl has passed: Stats says how many it is settling, and how many it has given up,
// which stay charged in full. It fails with ErrNotFound when the reservation has run out, and with ErrUnavailable, to be called again,
// when no node answers and 4096 others are being settled.
func (r *Reservation) Commit(cost int64) error {
	_, err := r.CommitCost(cost)
	return err
}

// CommitCost is Commit, and says what it has changed: nothing as long as no node has answered.
func (r *Reservation) CommitCost(cost int64) (Settled, error) {
	return r.end(limit.Amount{Cost: cost})
}

// CommitUsage is Commit for tokens of which the policy has the prices.
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

// Cancel ends the reservation and gives back all of it. It takes as long, and fails for the same reasons, as Commit.
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

// commit is what is sent to end the reservation.
func (r *Reservation) commit(a limit.Amount) limit.Commit {
	ask := limit.Commit{Target: r.target, Amount: a, ReservationID: r.id}
	if a.Cost > 0 || a.Usage != nil {
		ask.Class = r.class
	}
	return ask
}

// settle says that the reservation is being settled from now on, and reports false where that is so already, or nothing is held.
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

// unsettled says that settling the reservation has failed.
func (r *Reservation) unsettled() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.settled = false
}

// Cost is what the work of a reservation has cost.
type Cost struct {
	Reservation *Reservation
	Units       int64 // 0, with no Usage: the work did not take place
	Usage       Usage // in place of Units
}

// SettledResult is the answer to one commit of several: what it has changed, or its error.
type SettledResult = limit.SettledResult

// CommitEach is Commit for up to 1000 reservations in one call, such as those of one ReserveAll. Each has a result of its own, in its
// place, or goes on in the background as Commit does. An error of the whole means that the costs are not valid, or ErrClosed.
func (c *Client) CommitEach(costs []Cost) ([]SettledResult, error) {
	if len(costs) > limit.MaxBatch {
		return nil, invalid("commits", "must be at most %d, not %d", limit.MaxBatch, len(costs))
	}
	list := "" // as an error names it
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
		err = nil // the results have it
	}
	return results, err
}

// commitEach commits one reservation or several. That no node answers for the only one is an error of the whole.
func (c *Client) commitEach(ctx context.Context, asks []limit.Commit) ([]SettledResult, error) {
	if len(asks) > 1 {
		return c.svc.CommitEach(ctx, asks)
	}
	got, err := c.svc.Commit(ctx, asks[0])
	if unavailable(err) || ctx.Err() != nil {
		return nil, err
	}
	return []SettledResult{{Settled: got, Err: err}}, nil
}

// sameAs tells whether the reservation is of a limit and key.
func (r *Reservation) sameAs(t *limit.Target) bool {
	return r.target.Key == t.Key && scopeOf(&r.target) == scopeOf(t)
}

// newReservation is what ask, sent at asked, was given. The owner reckons its life from a later moment than this one does.
func newReservation(c *Client, got *Decision, ask *limit.Reserve, asked time.Duration) *Reservation {
	return &Reservation{
		c: c, target: ask.Target, class: ask.Class, id: got.ReservationID, units: got.Granted,
		safe: asked + limit.Shortened(cmp.Or(ask.TTL, limit.DefaultReservation)),
	}
}
