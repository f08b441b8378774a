package client

import (
	"hash/maphash"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
)

// memory answers questions that were refused a moment ago. Its methods are safe for concurrent use; those of nil do
// nothing. Instants are those of Client.now.
type memory struct {
	hash     func([3]string) uint64 // of policy, namespace and key: it leaves the limit out, and is equal for equal states
	refusals lend.Refusals[subject, Decision]
}

// subject is what a refusal was about.
type subject struct {
	policy, namespace, key string
	limit                  algo.Limit // the zero value: that of the policy
}

func (t *target) subject() subject {
	s := subject{policy: t.Policy, namespace: t.Namespace, key: t.Key}
	if t.Limit != nil {
		s.limit = *t.Limit
	}
	return s
}

func newMemory() *memory {
	seed := maphash.MakeSeed()
	return &memory{hash: func(texts [3]string) uint64 { return maphash.Comparable(seed, texts) }}
}

func (m *memory) hashOf(t *target) uint64 { return m.hash([3]string{t.Policy, t.Namespace, t.Key}) }

// plain tells whether a refusal of q says nothing but that there is no room. One under the caller's own request id is
// not answered from memory, since what was admitted under it is to be admitted again.
func (q *question) plain() bool { return q.cost > 0 && !q.partial && q.requestID == "" }

// recall answers the questions, if it knows the answers to all of them.
func (m *memory) recall(a *asking, now time.Duration) bool {
	if m == nil {
		return false
	}
	for i := range a.qs {
		q := &a.qs[i]
		if !q.plain() {
			return false
		}
		r, _, ok := m.refusals.Find(m.hashOf(&q.target), q.subject(), q.cost, int64(now))
		if !ok {
			return false
		}
		a.results[i].Decision = r.Decision
		a.results[i].Age(now - time.Duration(r.Came))
	}
	return len(a.qs) > 0
}

// mark notes what remember needs of questions that are about to be sent.
func (m *memory) mark(a *asking) {
	if m == nil {
		return
	}
	for i := range a.qs {
		a.marks[i] = m.refusals.Mark(m.hashOf(&a.qs[i].target))
	}
}

// admitted is told of a charge that was or may have been made.
func (m *memory) admitted(t *target) {
	if m != nil {
		m.refusals.Admitted(m.hashOf(t))
	}
}

// borrowed is told of a charge to a key of t that was admitted from a loan.
func (m *memory) borrowed(t *target, key string) {
	if m != nil && m.refusals.Used() {
		m.refusals.Admitted(m.hash([3]string{t.Policy, t.Namespace, key}))
	}
}

// remember keeps the answer to q, which was sent and came then, if it is a refusal that may be kept.
func (m *memory) remember(q *question, a *Result, mark uint64, sent, came time.Duration) {
	if m == nil || a.Err != nil || q.cost == 0 {
		return
	}
	if a.Allowed || a.FailedClosed {
		m.admitted(&q.target)
		return
	}
	if a.RememberFor <= 0 || q.partial {
		return
	}
	kept := a.Decision
	kept.RequestID = ""
	m.refusals.Remember(m.hashOf(&q.target), q.subject(), mark, lend.Refusal[Decision]{
		Decision: kept, Cost: q.cost,
		Came: int64(came), Until: int64(sent + limit.Remembered(a.RememberFor)),
	})
}

// forget forgets what is remembered of a key, and what is in flight: units were given back.
func (m *memory) forget(t *target) {
	if m != nil {
		m.refusals.Forget(m.hashOf(t))
	}
}
