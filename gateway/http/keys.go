package httpapi

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/internal/quotaheader"
	"github.com/weirlimit/weir/limit"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

type topKeysBody struct {
	Node              string          `json:"node"`
	Order             string          `json:"order"`
	CountedMS         int64           `json:"counted_ms"`
	PoliciesCountedMS int64           `json:"policies_counted_ms"`
	Keys              []keyUseBody    `json:"keys"`
	Policies          []policyUseBody `json:"policies"`
	Members           []string        `json:"members"`
	Unreachable       []string        `json:"unreachable"`
}

// keyUseBody is a message with other forms of some fields: those that are named here hide the message's.
type keyUseBody struct {
	*weirv1.KeyUse
	Algorithm   string   `json:"algorithm,omitempty"`
	WindowNS    struct{} `json:"window_ns,omitzero"`
	WindowMS    int64    `json:"window_ms,omitzero"`
	Limit       int64    `json:"limit,omitzero"`
	Used        *int64   `json:"used,omitempty"`
	Utilization *float64 `json:"utilization,omitempty"`
}

// policyUseBody is a message without a Banned of 0.
type policyUseBody struct {
	*weirv1.PolicyUse
	Banned uint64 `json:"banned,omitzero"`
}

// KeyOrders returns the names of weir.v1's orders of keys by number; number 0 has none.
func KeyOrders() []string { return []string{"", "busiest", "refused", "fullest"} }

// topKeysOf reads the query of GET /v1/keys/top.
func topKeysOf(raw string) (*weirv1.TopKeysRequest, *problem) {
	query, p := queryOf(raw, "order", "limit", "policy")
	ask := &weirv1.TopKeysRequest{Order: weirv1.KeyOrder_KEY_ORDER_BUSIEST, Policy: query["policy"]}
	if text, given := query["order"]; given {
		i := slices.Index(KeyOrders(), text)
		if i < 1 {
			return nil, invalid("order", "is not one of "+strings.Join(KeyOrders()[1:], ", "))
		}
		ask.Order = weirv1.KeyOrder(i)
	}
	if p != nil {
		return nil, p
	}
	most, p := whole(query, "limit", math.MaxUint32, 0)
	ask.Limit = uint32(most)
	return ask, p
}

// MarshalTopKeys returns top keys in the JSON of GET /v1/keys/top.
func MarshalTopKeys(order weirv1.KeyOrder, top *weirv1.TopKeysResponse) ([]byte, error) {
	return marshal(topKeysBodyOf(order, top))
}

func topKeysBodyOf(order weirv1.KeyOrder, top *weirv1.TopKeysResponse) *topKeysBody {
	body := &topKeysBody{
		Node: top.GetNode(), Order: KeyOrders()[max(order, weirv1.KeyOrder_KEY_ORDER_BUSIEST)],
		CountedMS:         top.GetCountedNs() / int64(time.Millisecond),
		PoliciesCountedMS: top.GetPoliciesCountedNs() / int64(time.Millisecond),
		Keys:              make([]keyUseBody, len(top.GetKeys())),
		Policies:          make([]policyUseBody, len(top.GetPolicies())),
		Members:           listed(top.GetMembers()), Unreachable: listed(top.GetUnreachable()),
	}
	for i, k := range top.GetKeys() {
		b := keyUseBody{KeyUse: k}
		if k.GetLimit() > 0 {
			used, full := k.GetUsed(), float64(k.GetUsed())/float64(k.GetLimit())
			b.Algorithm, b.Limit, b.Used, b.Utilization = algo.Algorithm(k.GetAlgorithm()).String(), k.GetLimit(),
				&used, &full
			b.WindowMS = quotaheader.RoundUp(time.Duration(k.GetWindowNs()), time.Millisecond)
		}
		body.Keys[i] = b
	}
	for i, p := range top.GetPolicies() {
		body.Policies[i] = policyUseBody{p, p.GetBanned()}
	}
	return body
}

// listed returns an empty list for nil, so that JSON has [] and not null.
func listed(names []string) []string {
	if names == nil {
		return []string{}
	}
	return names
}

// keyStateBody is the answer of POST /v1/keys/describe.
type keyStateBody struct {
	Node   string           `json:"node"`
	Banned int64            `json:"banned_for_ms,omitzero"`
	OnLoan int64            `json:"on_loan"`
	Limits []limitStateBody `json:"limits"`
}

type limitStateBody struct {
	Algorithm string       `json:"algorithm"`
	Limit     int64        `json:"limit"`
	WindowMS  int64        `json:"window_ms,omitzero"`
	Remaining int64        `json:"remaining"`
	Returns   []returnBody `json:"returns"`
}

type returnBody struct {
	Units   int64 `json:"units"`
	AfterMS int64 `json:"after_ms"`
}

func keyStateOf(state *limit.KeyState) any {
	out := keyStateBody{Node: state.Node, Banned: quotaheader.RoundUp(state.Banned, time.Millisecond),
		OnLoan: state.OnLoan, Limits: make([]limitStateBody, len(state.Limits))}
	for i := range state.Limits {
		l := &state.Limits[i]
		b := limitStateBody{Algorithm: l.Algorithm.String(), Limit: l.Limit, Remaining: l.Remaining,
			Returns:  make([]returnBody, len(l.Returns)),
			WindowMS: quotaheader.RoundUp(l.Window, time.Millisecond)}
		for j, back := range l.Returns {
			b.Returns[j] = returnBody{back.Units, quotaheader.RoundUp(back.After, time.Millisecond)}
		}
		out.Limits[i] = b
	}
	return &out
}
