package clustertest

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const belongings = `policies:
  - {name: ids, algorithm: sliding_log, limit: 5, window: 1h, durability: sync, on_error: closed}
  - {name: leases, algorithm: concurrency, limit: 1, ttl: 10m, durability: sync, on_error: closed}
`

// TestBelongings: what a key has besides its count goes with it when nodes come, leave and crash: the ids of requests that
// have been charged, and leases. Without voters a partition that has moved has nothing to tell its backup, which has everything.
func TestBelongings(t *testing.T) {
	survival(t)
	for _, voters := range []bool{true, false} {
		t.Run(fmt.Sprintf("voters=%t", voters), func(t *testing.T) {
			f := newFleet(t, 3, belongings, nil)
			if i := slices.Index(f.args, "--voters"); !voters {
				f.args = slices.Delete(f.args, i, i+2)
			}
			testBelongings(t, f)
		})
	}
}

func testBelongings(t *testing.T, f *fleet) {
	n := f.members
	f.start(n[:2]...)
	f.calm(n[:2]...)
	const keys = 150
	leases := make([]string, keys)
	charge := func(m *member, key int) {
		t.Helper()
		d := m.tell(t, "/v1/check", fmt.Sprintf(`{"policy":"ids","key":"key-%d","cost":2,"request_id":"request-%d"}`, key, key))
		expect.True(t, d.Allowed && d.Remaining == 3,
			"%s, key %d: the request is answered with allowed %t, %d remaining; want true, 3", m.name, key, d.Allowed, d.Remaining)
	}
	for key := range keys {
		charge(n[key%2], key)
		d := n[key%2].tell(t, "/v1/acquire", fmt.Sprintf(`{"policy":"leases","key":"key-%d"}`, key))
		must.True(t, d.Allowed && d.LeaseID != "", "acquire: %+v", d)
		leases[key] = d.LeaseID
	}
	// unchanged asks a member about all keys: the requests once more, which must not be charged again, and leases, of which
	// there is no second one to be had.
	unchanged := func(what string, m *member) {
		t.Helper()
		for key := range keys {
			charge(m, key)
			d := m.peekAt("ids", fmt.Sprintf("key-%d", key))
			expect.True(t, d.Remaining == 3, "%s: key %d has %d left, want 3", what, key, d.Remaining)
			if d := m.tell(t, "/v1/acquire", fmt.Sprintf(`{"policy":"leases","key":"key-%d"}`, key)); d.Allowed || d.FailedClosed {
				t.Errorf("%s: key %d: a second lease: %+v", what, key, d)
			}
			m.tell(t, "/v1/renew", fmt.Sprintf(`{"policy":"leases","key":"key-%d","lease_id":%q}`, key, leases[key]))
		}
	}
	f.start(n[2])
	f.calm(n...)
	unchanged("a node has come", n[0])
	f.leave(n[0])
	f.calm(n[1:]...)
	unchanged("a node has left", n[1])
	n[1].kill()
	f.calm(n[2])
	unchanged("a node has crashed", n[2])
	for key := range keys {
		body := fmt.Sprintf(`{"policy":"leases","key":"key-%d","lease_id":%q}`, key, leases[key])
		d := n[2].tell(t, "/v1/release", body)
		expect.True(t, d.Released, "key %d: the lease is not known any more", key)
	}
}

// answered is what the HTTP API answers to anything.
type answered struct {
	decision
	LeaseID  string `json:"lease_id"`
	Released bool   `json:"released"`
}

// tell posts a body and takes the answer apart, which must be one to a right question.
func (m *member) tell(t *testing.T, path, body string) (a answered) {
	t.Helper()
	code, _, answer, err := m.post(path, "application/json", []byte(body))
	if err == nil {
		err = json.Unmarshal(answer, &a)
	}
	expect.True(t, err == nil && (code == http.StatusOK || code == http.StatusTooManyRequests),
		"%s %s: status %d, %v: %s", path, body, code, err, answer)
	return a
}
