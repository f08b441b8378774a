package httpapi

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"

	weirv1 "github.com/weirlimit/weir/proto/weir/v1"
)

// Overrides lists and changes the limits of single keys and prefixes while nodes run. Its errors are *limit.Error.
type Overrides interface {
	List(ctx context.Context, req *weirv1.ListOverridesRequest) (*weirv1.ListOverridesResponse, error)
	Set(ctx context.Context, req *weirv1.SetOverrideRequest) (*weirv1.OverrideChange, error)
	Delete(ctx context.Context, req *weirv1.DeleteOverrideRequest) (*weirv1.OverrideChange, error)
}

// overrideBody is the body of PUT /v1/overrides.
type overrideBody struct {
	Policy   string         `json:"policy"`
	Key      string         `json:"key"`
	Prefix   string         `json:"prefix"`
	Settings jsontext.Value `json:"settings"`
}

// storedOverrideBody is an override in an answer: a message with other forms of some fields.
type storedOverrideBody struct {
	*weirv1.Override
	Settings        jsontext.Value `json:"settings,omitzero"`
	ChangedBy       string         `json:"changed_by"`
	ChangedAt       time.Time      `json:"changed_at"`
	ChangedAtUnixMs struct{}       `json:"changed_at_unix_ms,omitzero"`
}

type overridesBody struct {
	Overrides     []storedOverrideBody `json:"overrides"`
	NextPageToken string               `json:"next_page_token,omitempty"`
}

type overrideChangeBody struct {
	Override storedOverrideBody       `json:"override"`
	Before   *storedOverrideBody      `json:"before,omitempty"`
	Members  []*weirv1.OverrideMember `json:"members"` // weir.v1's messages, like reachedBody's Loans
}

// listOf reads the query of GET /v1/overrides.
func listOf(raw string) (*weirv1.ListOverridesRequest, *problem) {
	query, p := queryOf(raw, "policy", "key", "prefix", "page_size", "page_token")
	req := &weirv1.ListOverridesRequest{Policy: query["policy"], Key: query["key"], Prefix: query["prefix"],
		PageToken: query["page_token"]}
	if p != nil {
		return nil, p
	}
	size, p := whole(query, "page_size", math.MaxUint32, 0)
	req.PageSize = uint32(size)
	return req, p
}

// queryOf reads a percent-encoded query. It accepts only parameters with the given names, each once, not empty, in
// UTF-8. A gateway that copies its caller's text into the query therefore does not let the caller add or replace a
// parameter.
func queryOf(raw string, names ...string) (map[string]string, *problem) {
	query, err := url.ParseQuery(raw)
	if err != nil {
		return nil, invalid("", "the query is not well-formed: parameters are name=value, joined by & and percent-encoded")
	}
	out := make(map[string]string, len(query))
	for _, name := range slices.Sorted(maps.Keys(query)) {
		values := query[name]
		switch {
		case !slices.Contains(names, name):
			return nil, invalid(clip(strings.ToValidUTF8(name, "\uFFFD")),
				"there is no such parameter; there are "+strings.Join(names, ", "))
		case len(values) > 1:
			return nil, invalid(name, "is given twice")
		case values[0] == "":
			return nil, invalid(name, "is empty: give it a value or leave it out")
		case !utf8.ValidString(values[0]):
			return nil, invalid(name, "must be UTF-8")
		}
		out[name] = values[0]
	}
	return out, nil
}

// whole reads a parameter that is a number in digits, from 1 to most; otherwise is the value of a missing one.
func whole(query map[string]string, name string, most, otherwise int64) (int64, *problem) {
	text, given := query[name]
	if !given {
		return otherwise, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 1 || n > most || strings.Trim(text, "0123456789") != "" {
		return 0, invalid(name, fmt.Sprintf("must be 1 to %d, in digits", most))
	}
	return n, nil
}

// MarshalOverrides returns overrides in the JSON of GET /v1/overrides.
func MarshalOverrides(list *weirv1.ListOverridesResponse) ([]byte, error) {
	return marshal(overridesBodyOf(list))
}

// MarshalOverrideChange returns a change in the JSON of PUT and DELETE /v1/overrides.
func MarshalOverrideChange(change *weirv1.OverrideChange) ([]byte, error) {
	return marshal(changeBodyOf(change))
}

func overridesBodyOf(list *weirv1.ListOverridesResponse) *overridesBody {
	body := overridesBody{Overrides: make([]storedOverrideBody, len(list.Overrides)), NextPageToken: list.NextPageToken}
	for i, o := range list.Overrides {
		body.Overrides[i] = storedOverrideOf(o)
	}
	return &body
}

func changeBodyOf(change *weirv1.OverrideChange) any {
	body := overrideChangeBody{Override: storedOverrideOf(change.Override), Members: change.Members}
	if change.Before != nil {
		before := storedOverrideOf(change.Before)
		body.Before = &before
	}
	return &body
}

func storedOverrideOf(o *weirv1.Override) storedOverrideBody {
	body := storedOverrideBody{Override: o, ChangedBy: o.ChangedBy, ChangedAt: time.UnixMilli(o.ChangedAtUnixMs).UTC()}
	if o.Settings != "" {
		body.Settings = jsontext.Value(o.Settings)
	}
	return body
}
