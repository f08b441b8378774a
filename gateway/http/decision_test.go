package httpapi

import (
	_ "embed"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/google/go-cmp/cmp"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/test/must"
)

//go:embed PROBLEMS.md
var problemsPage string

func unmarshal(text string, v any) error { return json.Unmarshal([]byte(text), v) }

// The same fields for the JSON library, which is what the encoder by hand is held to.
type (
	decisionFields struct {
		Allowed      bool           `json:"allowed"`
		Granted      int64          `json:"granted"`
		Limit        int64          `json:"limit"`
		Remaining    int64          `json:"remaining"`
		RetryAfterMS *int64         `json:"retry_after_ms,omitzero"`
		ResetAfterMS int64          `json:"reset_after_ms"`
		DelayMS      int64          `json:"delay_ms"`
		Policy       string         `json:"policy"`
		Shadow       bool           `json:"shadow"`
		Degraded     bool           `json:"degraded"`
		FailedOpen   bool           `json:"failed_open"`
		FailedClosed bool           `json:"failed_closed"`
		Estimated    bool           `json:"retry_after_estimated,omitzero"`
		Banned       bool           `json:"banned,omitzero"`
		NearLimit    bool           `json:"near_limit,omitzero"`
		RequestID    string         `json:"request_id,omitempty"`
		LeaseID      string         `json:"lease_id,omitempty"`
		Reservation  string         `json:"reservation_id,omitempty"`
		Limits       []statusFields `json:"limits,omitempty"`
	}
	statusFields struct {
		Limit        int64  `json:"limit"`
		WindowMS     int64  `json:"window_ms,omitzero"`
		Remaining    int64  `json:"remaining"`
		RetryAfterMS *int64 `json:"retry_after_ms,omitzero"`
		ResetAfterMS int64  `json:"reset_after_ms"`
	}
)

func TestDecisionEncoding(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	ms := func(d time.Duration) int64 { return int64(math.Ceil(float64(d) / 1e6)) }
	duration := func() time.Duration { return time.Duration(random.Int64N(5e6)) }
	wait := func() (time.Duration, *int64) {
		if random.IntN(3) == 0 {
			return algo.Never, nil
		}
		d := duration()
		n := ms(d)
		return d, &n
	}
	text := func() string { return []string{"", "a", `"\`, "\x00\n\u2028", "käse", "<&>", "😀"}[random.IntN(7)] }
	for range 2000 {
		d := limit.Decision{
			Allowed: random.IntN(2) == 0, Granted: random.Int64N(9), Limit: random.Int64N(9) - 1, Remaining: random.Int64(),
			ResetAfter: duration(), Delay: duration(), Policy: text(),
			Shadow: random.IntN(2) == 0, Degraded: random.IntN(2) == 0, FailedOpen: random.IntN(2) == 0,
			FailedClosed: random.IntN(2) == 0, RequestID: text(), LeaseID: text(),
			ReservationID: text(), NearLimit: random.IntN(2) == 0, Banned: random.IntN(2) == 0, RetryAfterEstimated: random.IntN(2) == 0,
		}
		f := decisionFields{
			Allowed: d.Allowed, Granted: d.Granted, Limit: d.Limit, Remaining: d.Remaining, ResetAfterMS: ms(d.ResetAfter),
			DelayMS: ms(d.Delay), Policy: d.Policy, Shadow: d.Shadow, Degraded: d.Degraded, FailedOpen: d.FailedOpen,
			FailedClosed: d.FailedClosed, RequestID: d.RequestID, LeaseID: d.LeaseID,
			Reservation: d.ReservationID, NearLimit: d.NearLimit, Banned: d.Banned, Estimated: d.RetryAfterEstimated,
		}
		d.RetryAfter, f.RetryAfterMS = wait()
		if d.Allowed {
			f.RetryAfterMS = new(int64)
		}
		for range random.IntN(4) {
			l := limit.LimitStatus{Limit: random.Int64N(9) - 1, Window: time.Duration(random.Int64N(3)) * time.Second,
				Remaining: random.Int64N(9), ResetAfter: duration()}
			g := statusFields{Limit: l.Limit, WindowMS: ms(l.Window), Remaining: l.Remaining, ResetAfterMS: ms(l.ResetAfter)}
			l.RetryAfter, g.RetryAfterMS = wait()
			d.Limits, f.Limits = append(d.Limits, l), append(f.Limits, g)
		}
		want := must.Value(json.Marshal(&f))(t)
		must.NoDiff(t, cmp.Diff(string(want), string(appendDecision(nil, &d))), "%+v (-library +by hand)", d)
	}
}
