// Command envoyset writes the interface definitions of Envoy's rate limit service, and all that they import, as a
// FileDescriptorSet to standard output. Envoy's Go module holds the generated code only; protoc needs the definitions
// for what imports them.
package main

import (
	"fmt"
	"os"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

func main() {
	set, done := new(descriptorpb.FileDescriptorSet), make(map[string]bool)
	var add func(f protoreflect.FileDescriptor)
	add = func(f protoreflect.FileDescriptor) {
		if done[f.Path()] {
			return
		}
		done[f.Path()] = true
		for i := range f.Imports().Len() { // those first
			add(f.Imports().Get(i).FileDescriptor)
		}
		set.File = append(set.File, protodesc.ToFileDescriptorProto(f))
	}
	add(ratelimitv3.File_envoy_service_ratelimit_v3_rls_proto)
	out, err := proto.Marshal(set)
	if err == nil {
		_, err = os.Stdout.Write(out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
