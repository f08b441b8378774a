package client

import (
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weirlimit/weir/limit"
)

// WithLogger sets where the Client logs that its fail policy begins to answer because no node does, with the reason,
// and that nodes answer again. Each is one line at level WARN. Default: slog.Default().
func WithLogger(log *slog.Logger) Option { return func(o *options) { o.log = log } }

// WithObserver has f called with every decision before it is returned. f is called by many goroutines at once and must
// return soon. Default: no observer.
func WithObserver(f func(Observed)) Option { return func(o *options) { o.observer = f } }

// Observed is a decision and its check.
type Observed struct {
	Policy   string // empty: an inline limit
	Key      string
	Cost     int64 // as asked for; 0: a peek
	Decision Decision
	Err      error // in place of the Decision
}

// Counts are numbers of decisions by their kind.
type Counts struct {
	Admitted, Refused uint64 // by the limit
	// FailedOpen and FailedClosed were answered by a fail policy: the Client's, or on_error of the policy.
	FailedOpen, FailedClosed uint64
	// Errors counts calls without a decision, such as for a policy that does not exist.
	Errors uint64
}

// Counter counts decisions. The zero value is ready for use. It is safe for concurrent use.
type Counter struct {
	stripes [8]struct {
		of [5]atomic.Uint64 // as in Counts
		_  [24]byte         // each stripe has a cache line of its own
	}
}

// Count counts one decision, or, if err is not nil, an error.
func (c *Counter) Count(d *Decision, err error) {
	kind := 1
	switch {
	case err != nil:
		kind = 4
	case d.FailedOpen:
		kind = 2
	case d.FailedClosed:
		kind = 3
	case d.Allowed:
		kind = 0
	}
	c.stripes[rand.Uint32()%uint32(len(c.stripes))].of[kind].Add(1)
}

// Counts returns the numbers of decisions so far.
func (c *Counter) Counts() Counts {
	var sum [5]uint64
	for i := range c.stripes {
		for kind := range sum {
			sum[kind] += c.stripes[i].of[kind].Load()
		}
	}
	return Counts{Admitted: sum[0], Refused: sum[1], FailedOpen: sum[2], FailedClosed: sum[3], Errors: sum[4]}
}

// Stats has counts of what a Client has answered, and its state.
type Stats struct {
	Counts
	// Unanswered is how many decisions of FailedOpen and FailedClosed the Client's fail policy made because no node
	// answered.
	Unanswered uint64
	// Nodes is how many nodes the Client knows. Ready is how many of them are connected, say that they are ready, and
	// have left no call unanswered since. The Client connects a node when it first needs it.
	Nodes, Ready int
	// Settling is how many reservations are being committed or cancelled in the background because no node has
	// answered. Unsettled is how many were given up, because their ttl passed, a node failed the commit or the Client
	// was closed: the cluster ends them as the policy's on_expiry says.
	Settling  int
	Unsettled uint64
	// WithoutNode is set while the Client's fail policy answers. Reason is why no node does.
	WithoutNode bool
	Reason      string
}

// Stats returns the counts so far. They are all zero for a Client that decides in this process.
func (c *Client) Stats() Stats {
	if c.nodes == nil {
		return Stats{}
	}
	s := Stats{Counts: c.counter.Counts(), Unanswered: c.outage.answers.Load()}
	list, _, _ := c.nodes.members()
	s.Nodes = len(list)
	for _, m := range list {
		if m.state.Load() == ready {
			s.Ready++
		}
	}
	s.Settling, s.Unsettled = int(c.settling.now.Load()), c.settling.unsettled.Load()
	s.WithoutNode, s.Reason = c.outage.state()
	return s
}

// observe counts the answer to a check, and passes it to the observer.
func (c *Client) observe(ck *limit.Check, d *Decision, err error) {
	c.observeOne(&ck.Target, ck.Key, ck.Cost, d, err)
}

// observeOne is observe for a check of key; it ignores t.Key.
func (c *Client) observeOne(t *limit.Target, key string, cost int64, d *Decision, err error) {
	if c.counter == nil {
		return
	}
	c.counter.Count(d, err)
	if c.observer != nil {
		c.observer(Observed{t.Policy, key, cost, *d, err})
	}
}

// The log says that nodes answer again only after the fail policy has not answered for outageQuiet. So a cluster that
// answers only some calls makes two log lines in that time, not two for each call.
const outageQuiet = 5 * time.Second

// outage logs when the fail policy begins to answer in place of nodes, and when nodes answer again.
type outage struct {
	log     *slog.Logger
	onError OnError
	on      atomic.Bool
	answers atomic.Uint64 // of the fail policy, since the Client was made

	mu          sync.Mutex
	began, last time.Duration
	before      uint64 // answers at the beginning of the outage
	reason      string
}

// failed notes that the fail policy answers, at an instant, because of an error.
func (o *outage) failed(now time.Duration, why error) {
	o.mu.Lock()
	o.last = now
	began := !o.on.Load()
	if began {
		o.began, o.before, o.reason = now, o.answers.Load(), reasonOf(why)
		o.on.Store(true)
	}
	o.answers.Add(1)
	reason := o.reason
	o.mu.Unlock()
	if began && o.log != nil {
		o.log.Warn("no rate limit node answers", "reason", reason, "on_error", o.onError.String())
	}
}

// answered notes that a node has answered.
func (o *outage) answered(now time.Duration) {
	if !o.on.Load() {
		return
	}
	o.mu.Lock()
	over := o.on.Load() && now-o.last >= outageQuiet
	if over {
		o.on.Store(false)
	}
	lasted, answers, reason := o.last-o.began, o.answers.Load()-o.before, o.reason
	o.mu.Unlock()
	if over && o.log != nil {
		o.log.Warn("rate limit nodes answer again", "reason", reason, "on_error", o.onError.String(),
			"answered_without_node", answers, "lasted", lasted)
	}
}

// state reports whether the fail policy answers, and why.
func (o *outage) state() (on bool, reason string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.on.Load() {
		return false, ""
	}
	return true, o.reason
}

// reasonOf returns an error's message without its kind.
func reasonOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Message
	}
	return err.Error()
}
