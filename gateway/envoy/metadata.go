package envoy

import (
	"strconv"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// metadataOf returns the dynamic metadata of a response: the request, the metadata of limits that were not exceeded,
// and near_limit and banned if a decision has them.
func metadataOf(in *ratelimitv3.RateLimitRequest, all []asked) *structpb.Struct {
	fields := map[string]*structpb.Value{"domain": structpb.NewStringValue(in.GetDomain())}
	list := new(structpb.ListValue)
	for _, d := range in.GetDescriptors() {
		entries := new(structpb.ListValue)
		for _, e := range d.GetEntries() {
			entries.Values = append(entries.Values, structpb.NewStringValue(e.GetKey()+"="+e.GetValue()))
		}
		one := map[string]*structpb.Value{"entries": structpb.NewListValue(entries)}
		if l := d.GetLimit(); l != nil {
			one["limit"] = structpb.NewStringValue("requests_per_unit:" +
				strconv.FormatUint(uint64(l.GetRequestsPerUnit()), 10) + " unit:" + l.GetUnit().String())
		}
		if n := d.GetHitsAddend(); n != nil {
			one["hitsAddend"] = structpb.NewNumberValue(float64(n.GetValue()))
		}
		list.Values = append(list.Values, structpb.NewStructValue(&structpb.Struct{Fields: one}))
	}
	fields["descriptors"] = structpb.NewListValue(list)
	if n := in.GetHitsAddend(); n != 0 {
		fields["hitsAddend"] = structpb.NewNumberValue(float64(n))
	}
	passed := &structpb.Struct{Fields: make(map[string]*structpb.Value)}
	for i := range all {
		if a := &all[i]; a.rule != nil && !a.unlimited && !a.over && a.metadata != nil {
			merge(passed, a.metadata)
		}
	}
	near, banned := flags(all)
	if near {
		fields["near_limit"] = structpb.NewBoolValue(true)
	}
	if banned {
		fields["banned"] = structpb.NewBoolValue(true)
	}
	if len(passed.Fields) > 0 {
		fields["metadata"] = structpb.NewStructValue(passed)
	}
	return &structpb.Struct{Fields: fields}
}

// merge adds fields to a struct. A field that exists keeps its value, except that two structs are merged.
func merge(to, from *structpb.Struct) {
	for name, v := range from.GetFields() {
		have, ok := to.Fields[name]
		if !ok {
			to.Fields[name] = proto.Clone(v).(*structpb.Value) // the original belongs to the configuration
			continue
		}
		if a, b := have.GetStructValue(), v.GetStructValue(); a != nil && b != nil {
			if a.Fields == nil {
				a.Fields = make(map[string]*structpb.Value)
			}
			merge(a, b)
		}
	}
}
