package client

import (
	"hash/maphash"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/lend"
	"github.com/weirlimit/weir/limit"
)

// memory answers checks that were refused a moment ago. Its methods are safe for concurrent use; those of a nil *memory
// do nothing. Instants are those of Client.now.
type memory struct {
	// of policy, namespace and key, without the limit, so that equal states have equal hashes
	hash     func([3]string) uint64
	refusals lend.Refusals[subject, Decision]
}

// subject is the state and the limit of a refused check.
type subject struct {
	policy, namespace, key string
	limit                  algo.Limit // of an inline limit; the zero value for a policy
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

// recall answers a check if a refusal is remembered for it. The check must have no request id, because a charge that a
// node admitted under the id is admitted again.
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

// mark returns the mark for remember. The caller must call it before it sends the check.
func (m *memory) mark(t *limit.Target) uint64 {
	if m == nil {
		return 0
	}
	return m.refusals.Mark(m.hashOf(t))
}

// admitted forgets the refusals of a key after a charge that was or may have been made: their RetryAfter has become too
// short.
func (m *memory) admitted(t *limit.Target) {
	if m != nil && m.refusals.Used() {
		m.refusals.Admitted(m.hashOf(t))
	}
}

// remember keeps the answer to a check if it is a refusal that may be kept. sent and came are when the check was sent
// and its answer came.
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

// forget forgets the refusals of a key, and has remember drop those that are in flight, because units were given back.
func (m *memory) forget(t *limit.Target) {
	if m != nil {
		m.refusals.Forget(m.hashOf(t))
	}
}
