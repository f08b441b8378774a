package client

import (
	"hash/maphash"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
)

// memory answers checks that were refused a moment ago. Its methods are safe for concurrent use; those of nil do
// nothing. Instants are those of Client.now.
type memory struct {
	hash     func([3]string) uint64 // of policy, namespace and key, without the limit: equal for equal states
	refusals lend.Refusals[subject, Decision]
}

// subject is what a refusal was about.
type subject struct {
	policy, namespace, key string
	limit                  algo.Limit // the zero value: that of the policy
}

func subjectOf(t *limit.Target) subject {
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

func (m *memory) hashOf(t *limit.Target) uint64 {
	return m.hash([3]string{t.Policy, t.Namespace, t.Key})
}

// recall answers a check that has no request id, if it knows the answer: what was admitted under an id is to be admitted again.
func (m *memory) recall(ck *limit.Check, d *Decision, now time.Duration) bool {
	if m == nil || ck.Cost <= 0 || ck.Partial {
		return false
	}
	r, ok := m.refusals.Find(m.hashOf(&ck.Target), subjectOf(&ck.Target), ck.Cost, int64(now))
	if ok {
		*d = r.Decision
		d.Age(now - time.Duration(r.Came))
	}
	return ok
}

// mark returns what remember needs of a check that is about to be sent.
func (m *memory) mark(t *limit.Target) uint64 {
	if m == nil {
		return 0
	}
	return m.refusals.Mark(m.hashOf(t))
}

// admitted forgets the refusals of a key after a charge that was or may have been made: their RetryAfter has become too short.
func (m *memory) admitted(t *limit.Target) {
	if m != nil && m.refusals.Used() {
		m.refusals.Admitted(m.hashOf(t))
	}
}

// remember keeps the answer to a check, which was sent and came then, if it is a refusal that may be kept.
func (m *memory) remember(ck *limit.Check, a *Result, mark uint64, sent, came time.Duration) {
	if m == nil || a.Err != nil || ck.Cost == 0 {
		return
	}
	if a.Allowed || a.FailedClosed {
		m.admitted(&ck.Target)
		return
	}
	if a.RememberFor <= 0 || ck.Partial {
		return
	}
	kept := a.Decision
	kept.RequestID = ""
	m.refusals.Remember(m.hashOf(&ck.Target), subjectOf(&ck.Target), mark, lend.Refusal[Decision]{
		Decision: kept, Cost: ck.Cost,
		Came: int64(came), Until: int64(sent + limit.Remembered(a.RememberFor)),
	})
}

// forget forgets what is remembered of a key, and what is in flight: units were given back.
func (m *memory) forget(t *limit.Target) {
	if m != nil {
		m.refusals.Forget(m.hashOf(t))
	}
}
