package httpapi

import (
	"cmp"
	_ "embed"
	"net/http"
	"strings"
	"time"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/auth"
	"github.com/weirlimit/weir/internal/quotaheader"
	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

//go:embed openapi.yaml
var openAPI string

// PolicyListing is the policies that a node has loaded, as in GET /v1/policies.
type PolicyListing struct {
	// Hash is a hash of the policies. It is equal on nodes that decide by the same policies.
	Hash string `json:"hash"`
	// ReloadError says why the last version of the policy files was rejected; empty: it was not.
	ReloadError string   `json:"reload_error,omitempty"`
	Policies    []Policy `json:"policies"` // in the order to show
}

// Policy describes one policy.
type Policy struct {
	Name      string       `json:"name"`
	Limits    []algo.Limit `json:"limits"`    // empty when the policy is unlimited
	Overrides int          `json:"overrides"` // number of keys and prefixes with limits of their own
	Shadow    bool         `json:"shadow"`
	OnError   string       `json:"on_error"` // "open", "closed" or "share"
}

func (x *exchange) policies() {
	listing := x.Policies()
	x.json(http.StatusOK, jsonType[0], &listing)
}

// MarshalPolicies returns policies in the JSON of GET /v1/policies.
func MarshalPolicies(listing PolicyListing) ([]byte, error) { return marshal(&listing) }

// statusBody is weir.v1's StatusResponse in this API's form: snake_case names, numbers as numbers, milliseconds.
type statusBody struct {
	Node          string       `json:"node"`
	Version       string       `json:"version"`
	Ready         bool         `json:"ready"`
	ReadyDetail   string       `json:"ready_detail,omitempty"`
	Partitions    uint32       `json:"partitions"`
	Ring          string       `json:"ring"`
	Members       []memberBody `json:"members"`
	PoliciesError string       `json:"policies_error,omitempty"`
}

type memberBody struct {
	Name       string `json:"name"`
	Boot       string `json:"boot"`
	State      string `json:"state"`
	HTTP       string `json:"http"`
	GRPC       string `json:"grpc"`
	Gossip     string `json:"gossip"`
	Peer       string `json:"peer"`
	Partitions uint32 `json:"partitions"`
	Reachable  bool   `json:"reachable"`
	*reachedBody
}

// reachedBody has the fields that only a member which has answered has: those of the message, for whose fields the
// generated code has JSON names. Fields of memberBody, and those that are named here, hide the message's.
type reachedBody struct {
	*weirv1.Member
	UptimeNS struct{}      `json:"uptime_ns,omitzero"`
	UptimeMS int64         `json:"uptime_ms"`
	Loans    *weirv1.Loans `json:"loans"`
}

func (x *exchange) status() {
	x.json(http.StatusOK, jsonType[0], statusBodyOf(x.Status(x.r.Context())))
}

// MarshalStatus returns a status in the JSON of GET /v1/status.
func MarshalStatus(st *weirv1.StatusResponse) ([]byte, error) { return marshal(statusBodyOf(st)) }

func statusBodyOf(st *weirv1.StatusResponse) *statusBody {
	body := &statusBody{Node: st.GetNode(), Version: st.GetVersion(), Ready: st.GetReady(),
		ReadyDetail: st.GetReadyDetail(), Partitions: st.GetPartitions(), Ring: st.GetRing(),
		PoliciesError: st.GetPoliciesError(), Members: make([]memberBody, len(st.GetMembers()))}
	for i, m := range st.GetMembers() {
		body.Members[i] = memberOf(m)
	}
	return body
}

func memberOf(m *weirv1.Member) memberBody {
	b := memberBody{Name: m.GetName(), Boot: m.GetBoot(), State: m.GetState(), HTTP: m.GetHttp(), GRPC: m.GetGrpc(),
		Gossip: m.GetGossip(), Peer: m.GetPeer(), Partitions: m.GetPartitions(), Reachable: m.GetReachable()}
	if b.Reachable {
		b.reachedBody = &reachedBody{Member: m, Loans: cmp.Or(m.GetLoans(), &weirv1.Loans{}),
			UptimeMS: quotaheader.RoundUp(time.Duration(m.GetUptimeNs()), time.Millisecond)}
	}
	return b
}

func (x *exchange) health() {
	x.json(http.StatusOK, jsonType[0], map[string]bool{"alive": true})
}

func (x *exchange) ready() {
	ready, detail := x.Ready()
	if x.HasRole != nil && !x.HasRole(x.r, auth.RoleRead) {
		detail = "" // detail may name members and files
	}
	status := http.StatusOK
	if !ready {
		status = http.StatusServiceUnavailable
	}
	x.json(status, jsonType[0], &struct {
		Ready  bool   `json:"ready"`
		Detail string `json:"detail,omitempty"`
	}{ready, detail})
}

func (a *api) handleOpenAPI(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/yaml")
	http.ServeContent(w, r, "openapi.yaml", time.Time{}, strings.NewReader(openAPI))
}
